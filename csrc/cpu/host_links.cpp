#include "octavo/host_links.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace octavo {
namespace {

constexpr int kNapMs = 50;  // who breaks off is seen after so long
constexpr int kFront = 0;

struct Head {
    Frame frame;
    std::uint32_t number;
    std::int64_t bytes;
};

void append(std::vector<char>& out, const void* data, std::int64_t bytes) {
    const char* begin = static_cast<const char*>(data);
    out.insert(out.end(), begin, begin + bytes);
}

std::int64_t bytes_of(const Columns& columns, int host) {
    return 4 * columns.rows * (*columns.spans)[static_cast<std::size_t>(host)].count;
}

}  // namespace

HostLinks::HostLinks(Team& team, std::vector<int> fds, int host)
    : team_(team), fds_(std::move(fds)), host_(host), out_(fds_.size()), in_(fds_.size()) {
    require(fds_.size() >= 2 && fds_.size() <= kMostHosts, "fds", "are not those of several hosts");
    require(host >= 0 && host < size(), "host", "is not one of the hosts");
    for (int other = 0; other < size(); ++other) {
        require((other == host) == (fds_[static_cast<std::size_t>(other)] < 0), "fds",
                "are not one for each other host");
    }
}

bool HostLinks::refuse(int host) {
    team_.break_off(Team::kHostStrange + static_cast<std::uint32_t>(host));
    return false;
}

bool HostLinks::tell(Frame frame, const void* data, std::int64_t bytes) {
    const Head head{frame, ++number_, bytes};
    std::vector<char>& out = out_[kFront];
    out.clear();
    append(out, &head, sizeof(head));
    append(out, data, bytes);
    flows_.clear();
    for (int other = 1; other < size(); ++other) {
        flows_.push_back({other, out.data(), static_cast<std::int64_t>(out.size()), nullptr, 0});
    }
    return move(flows_, team_.patience_s());
}

bool HostLinks::hear(Frame& frame, std::int64_t& bytes) {
    Head head{};
    flows_.assign(1, {kFront, nullptr, 0, reinterpret_cast<char*>(&head), sizeof(head)});
    if (!move(flows_, 0)) {
        return false;
    }
    if (head.number != ++number_ || head.bytes < 0) {
        return refuse(kFront);
    }
    frame = head.frame;
    bytes = head.bytes;
    return true;
}

bool HostLinks::read(void* data, std::int64_t bytes) {
    flows_.assign(1, {kFront, nullptr, 0, static_cast<char*>(data), bytes});
    return move(flows_, team_.patience_s());
}

bool HostLinks::exchange(std::initializer_list<Columns> columns) {
    ++number_;
    flows_.clear();
    for (int other = 0; other < size(); ++other) {
        if (other == host_) {
            continue;
        }
        std::vector<char>& out = out_[static_cast<std::size_t>(other)];
        std::vector<char>& in = in_[static_cast<std::size_t>(other)];
        Head head{Frame::kColumns, number_, 0};
        std::int64_t coming = 0;
        for (const Columns& each : columns) {
            head.bytes += each.for_front && other != kFront ? 0 : bytes_of(each, host_);
            coming += each.for_front && host_ != kFront ? 0 : bytes_of(each, other);
        }
        out.clear();
        append(out, &head, sizeof(head));
        for (const Columns& each : columns) {
            const Span own = (*each.spans)[static_cast<std::size_t>(host_)];
            for (std::int64_t row = 0; row < each.rows && !(each.for_front && other != kFront); ++row) {
                append(out, each.data + row * each.stride + own.first, 4 * own.count);
            }
        }
        in.resize(sizeof(head) + static_cast<std::size_t>(coming));
        flows_.push_back({other, out.data(), static_cast<std::int64_t>(out.size()), in.data(),
                          static_cast<std::int64_t>(in.size())});
    }
    if (!move(flows_, team_.patience_s())) {
        return false;
    }
    for (int other = 0; other < size(); ++other) {
        if (other == host_) {
            continue;
        }
        const std::vector<char>& in = in_[static_cast<std::size_t>(other)];
        Head head{};
        std::memcpy(&head, in.data(), sizeof(head));
        if (head.frame != Frame::kColumns || head.number != number_ ||
            head.bytes != static_cast<std::int64_t>(in.size() - sizeof(head))) {
            return refuse(other);
        }
        const char* from = in.data() + sizeof(head);
        for (const Columns& each : columns) {
            const Span theirs = (*each.spans)[static_cast<std::size_t>(other)];
            for (std::int64_t row = 0; row < each.rows && !(each.for_front && host_ != kFront); ++row) {
                std::memcpy(each.data + row * each.stride + theirs.first, from,
                            static_cast<std::size_t>(4 * theirs.count));
                from += 4 * theirs.count;
            }
        }
    }
    return true;
}

// False if the stream has ended.
bool HostLinks::step(Flow& flow, bool& moved) {
    const int fd = fds_[static_cast<std::size_t>(flow.host)];
    const auto failed = [] { return errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR; };
    if (flow.out_left > 0) {
        const ssize_t sent = ::send(fd, flow.out, static_cast<std::size_t>(flow.out_left), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && failed()) {
            return false;
        }
        if (sent > 0) {
            flow.out += sent;
            flow.out_left -= sent;
            num_sent_bytes_ += static_cast<std::uint64_t>(sent);
            moved = true;
        }
    }
    if (flow.in_left > 0) {
        const ssize_t got = ::recv(fd, flow.in, static_cast<std::size_t>(flow.in_left), MSG_DONTWAIT);
        if (got == 0 || (got < 0 && failed())) {
            return false;
        }
        if (got > 0) {
            flow.in += got;
            flow.in_left -= got;
            moved = true;
        }
    }
    return true;
}

// No patience: without end. It is counted in naps, as meetings do it.
bool HostLinks::move(std::vector<Flow>& flows, double patience_s) {
    double waited_s = 0;
    std::vector<pollfd> waits;
    for (;;) {
        bool moved = false;
        waits.clear();
        for (Flow& flow : flows) {
            if (!step(flow, moved)) {
                team_.break_off(Team::kHostGone + static_cast<std::uint32_t>(flow.host));
                return false;
            }
            if (flow.out_left > 0 || flow.in_left > 0) {
                const int events = (flow.out_left > 0 ? POLLOUT : 0) | (flow.in_left > 0 ? POLLIN : 0);
                waits.push_back({fds_[static_cast<std::size_t>(flow.host)], static_cast<short>(events), 0});
            }
        }
        if (waits.empty()) {
            return !team_.broken();
        }
        if (moved) {
            waited_s = 0;
            continue;
        }
        if (team_.broken()) {
            return false;
        }
        if (::poll(waits.data(), static_cast<nfds_t>(waits.size()), kNapMs) == 0) {
            waited_s += kNapMs * 1e-3;
        }
        if (patience_s > 0 && waited_s > patience_s) {
            const auto late = std::find_if(flows.begin(), flows.end(),
                                           [](const Flow& flow) { return flow.out_left > 0 || flow.in_left > 0; });
            team_.break_off(Team::kHostLate + static_cast<std::uint32_t>(late->host));
            return false;
        }
    }
}

}  // namespace octavo
