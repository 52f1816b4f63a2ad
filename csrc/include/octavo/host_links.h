// The connections of a group's host to its other hosts: what ranks of one host read from memory, those of others are
// sent.
//
// There is a stream to each other host, and what goes through it has a fixed order, which both sides know: orders of
// the front (host 0); in a step the columns that each host of a stage has computed, and the states that a stage has
// left for the next one; and at its end what hosts have written into blocks. The first rank of a host sends and
// receives for all. No process trusts what it is sent to fit: frames say their kind, number and size. What is said in
// which frame is group_hosts.h.
//
// What goes wrong breaks the team of this host.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "octavo/team.h"

namespace octavo {

struct Span {
    std::int64_t first = 0, count = 0;

    bool operator==(const Span& other) const { return first == other.first && count == other.count; }
    bool within(std::int64_t all) const { return first >= 0 && count >= 0 && first <= all && count <= all - first; }
};

// Some columns of numbers [rows, stride] belong to each host.
struct Columns {
    void* data;
    std::int64_t rows, stride;
    const std::vector<Span>* spans;  // by host
    std::int64_t number_bytes = 4;
};

// What comes from a host.
struct Parcel {
    int host;
    std::int64_t bytes;
};

enum class Frame : std::uint32_t {
    kColumns,
    kOrder,
    kHidden,
    kBlocks,
    kStates,
    kSlots,
    kWanted,
    kAdapter,
    kQuestions,
    kAnswers
};

class HostLinks {
  public:
    static constexpr int kMostHosts = 64;

    // fds: sockets of streams, by host; -1 for this one. They are not closed here.
    HostLinks(Team& team, std::vector<int> fds, int host);

    int host() const { return host_; }
    int size() const { return static_cast<int>(fds_.size()); }

    // All of them: false if the team is broken. Only one thread may call any of them.
    // In the front: bytes for all other hosts.
    bool tell(Frame frame, const void* data, std::int64_t bytes);
    // Waits for a host, and for the front without end; then `read` has to take so many bytes.
    bool hear(Frame& frame, std::int64_t& bytes, int host = 0);
    bool read(void* data, std::int64_t bytes, int host = 0);
    // In some neighbouring hosts at once: own columns go to the others of them, and theirs come.
    bool exchange(std::initializer_list<Columns> columns, const Span& hosts);
    // To one host, and from some, in one frame each. `received` is valid until the next call.
    bool send(int host, Frame frame, const void* data, std::int64_t bytes);
    // The same of what is written where `begin` says.
    char* begin(int host, Frame frame, std::int64_t bytes);
    bool send_begun(int host);
    bool receive(Frame frame, const std::vector<Parcel>& parcels);
    const char* received(int host) const;
    // What was sent is not what it can be.
    bool refuse(int host);

  private:
    struct Flow {
        int host;
        const char* out;
        std::int64_t out_left;
        char* in;
        std::int64_t in_left;
    };

    void leave(int host);
    void expect_frame(int host, std::int64_t bytes);
    bool is_expected(int host, Frame frame);
    bool move(double patience_s);
    bool step(Flow& flow, bool& moved);

    Team& team_;
    std::vector<int> fds_;
    int host_;
    std::vector<std::uint32_t> sent_, heard_;  // frames, by host
    std::vector<std::vector<char>> out_, in_;
    std::vector<Flow> flows_;
};

}  // namespace octavo
