#include "octavo/host_links.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
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

Span span_of(const Columns& columns, int host) { return (*columns.spans)[static_cast<std::size_t>(host)]; }
std::int64_t row_bytes_of(const Columns& columns, int host) {
    return columns.number_bytes * span_of(columns, host).count;
}
std::int64_t bytes_of(const Columns& columns, int host) { return columns.rows * row_bytes_of(columns, host); }

char* place_of(const Columns& columns, int host, std::int64_t row) {
    return static_cast<char*>(columns.data) +
           columns.number_bytes * (row * columns.stride + span_of(columns, host).first);
}

// The columns of a host go to `to`. Returns their end.
char* pack(const Columns& columns, int host, char* to) {
    const std::int64_t bytes = row_bytes_of(columns, host);
    for (std::int64_t row = 0; row < columns.rows; ++row, to += bytes) {
        std::memcpy(to, place_of(columns, host, row), static_cast<std::size_t>(bytes));
    }
    return to;
}

// The columns of a host, which lie at `from`. Returns their end.
const char* unpack(const Columns& columns, int host, const char* from) {
    const std::int64_t bytes = row_bytes_of(columns, host);
    for (std::int64_t row = 0; row < columns.rows; ++row, from += bytes) {
        std::memcpy(place_of(columns, host, row), from, static_cast<std::size_t>(bytes));
    }
    return from;
}

}  // namespace

HostLinks::HostLinks(Team& team, std::vector<int> fds, int host)
    : team_(team),
      fds_(std::move(fds)),
      host_(host),
      sent_(fds_.size()),
      heard_(fds_.size()),
      out_(fds_.size()),
      in_(fds_.size()) {
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

char* HostLinks::begin(int host, Frame frame, std::int64_t bytes) {
    const auto at = static_cast<std::size_t>(host);
    const Head head{frame, ++sent_[at], bytes};
    out_[at].resize(sizeof(head) + static_cast<std::size_t>(bytes));
    std::memcpy(out_[at].data(), &head, sizeof(head));
    return out_[at].data() + sizeof(head);
}

// What was begun is to go.
void HostLinks::leave(int host) {
    const std::vector<char>& out = out_[static_cast<std::size_t>(host)];
    flows_.push_back({host, out.data(), static_cast<std::int64_t>(out.size()), nullptr, 0});
}

void HostLinks::expect_frame(int host, std::int64_t bytes) {
    std::vector<char>& in = in_[static_cast<std::size_t>(host)];
    in.resize(sizeof(Head) + static_cast<std::size_t>(bytes));
    flows_.push_back({host, nullptr, 0, in.data(), static_cast<std::int64_t>(in.size())});
}

bool HostLinks::is_expected(int host, Frame frame) {
    const auto at = static_cast<std::size_t>(host);
    Head head{};
    std::memcpy(&head, in_[at].data(), sizeof(head));
    return (head.frame == frame && head.number == ++heard_[at] &&
            head.bytes == static_cast<std::int64_t>(in_[at].size() - sizeof(head))) ||
           refuse(host);
}

const char* HostLinks::received(int host) const { return in_[static_cast<std::size_t>(host)].data() + sizeof(Head); }

bool HostLinks::tell(Frame frame, const void* data, std::int64_t bytes) {
    flows_.clear();
    for (int other = 1; other < size(); ++other) {
        std::copy_n(static_cast<const char*>(data), bytes, begin(other, frame, bytes));
        leave(other);
    }
    return move(team_.patience_s());
}

bool HostLinks::hear(Frame& frame, std::int64_t& bytes, int host) {
    Head head{};
    flows_.assign(1, {host, nullptr, 0, reinterpret_cast<char*>(&head), sizeof(head)});
    if (!move(host == kFront ? 0 : team_.patience_s())) {
        return false;
    }
    if (head.number != ++heard_[static_cast<std::size_t>(host)] || head.bytes < 0) {
        return refuse(host);
    }
    frame = head.frame;
    bytes = head.bytes;
    return true;
}

bool HostLinks::read(void* data, std::int64_t bytes, int host) {
    flows_.assign(1, {host, nullptr, 0, static_cast<char*>(data), bytes});
    return move(team_.patience_s());
}

bool HostLinks::send(int host, Frame frame, const void* data, std::int64_t bytes) {
    std::copy_n(static_cast<const char*>(data), bytes, begin(host, frame, bytes));
    return send_begun(host);
}

bool HostLinks::send_begun(int host) {
    flows_.clear();
    leave(host);
    return move(team_.patience_s());
}

bool HostLinks::receive(Frame frame, const std::vector<Parcel>& parcels) {
    flows_.clear();
    for (const Parcel& parcel : parcels) {
        expect_frame(parcel.host, parcel.bytes);
    }
    return move(team_.patience_s()) && std::all_of(parcels.begin(), parcels.end(), [&](const Parcel& parcel) {
               return is_expected(parcel.host, frame);
           });
}

bool HostLinks::exchange(std::initializer_list<Columns> columns, const Span& hosts) {
    const int first = static_cast<int>(hosts.first), end = static_cast<int>(hosts.first + hosts.count);
    flows_.clear();
    for (int other = first; other < end; ++other) {
        if (other == host_) {
            continue;
        }
        std::int64_t leaving = 0, coming = 0;
        for (const Columns& each : columns) {
            leaving += bytes_of(each, host_);
            coming += bytes_of(each, other);
        }
        char* out = begin(other, Frame::kColumns, leaving);
        for (const Columns& each : columns) {
            out = pack(each, host_, out);
        }
        leave(other);
        expect_frame(other, coming);
    }
    if (!move(team_.patience_s())) {
        return false;
    }
    for (int other = first; other < end; ++other) {
        if (other == host_) {
            continue;
        }
        if (!is_expected(other, Frame::kColumns)) {
            return false;
        }
        const char* from = received(other);
        for (const Columns& each : columns) {
            from = unpack(each, other, from);
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
bool HostLinks::move(double patience_s) {
    double waited_s = 0;
    std::vector<pollfd> waits;
    const auto began = std::chrono::steady_clock::now();
    for (;;) {
        bool moved = false;
        waits.clear();
        for (Flow& flow : flows_) {
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
            if (patience_s > 0) {
                team_.note_waited(std::chrono::steady_clock::now() - began);
            }
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
            const auto late = std::find_if(flows_.begin(), flows_.end(),
                                           [](const Flow& flow) { return flow.out_left > 0 || flow.in_left > 0; });
            team_.break_off(Team::kHostLate + static_cast<std::uint32_t>(late->host));
            return false;
        }
    }
}

}  // namespace octavo
