// The hosts of a group as one of them sees them, whatever decoder they run: what is said through the links of
// host_links.h. The first rank of a host speaks for all of its ranks; the others know by it which hosts there are.
//
// In a step hosts of one stage exchange the columns that each has computed, and send the next stage the states that
// they have left. At its end the front gets the states that it wants, and what the others have written into blocks: it
// has all blocks. What is written outside of steps, at the front alone, it tells the others before the next order: to
// each what that reads.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "octavo/host_links.h"
#include "octavo/team_order.h"
#include "octavo/wanted_logits.h"

namespace octavo {

struct KvPages;

class GroupHosts {
  public:
    // fds: as HostLinks has them. kv_heads, layers: those of each host. Layers of neighbours are the same (a stage has
    // several hosts) or follow each other (a host has several stages).
    GroupHosts(Team& team, std::vector<int> fds, int host, std::vector<Span> kv_heads, std::vector<Span> layers);

    int host() const { return links_.host(); }
    int size() const { return links_.size(); }
    bool speaks() const { return team_.rank() == 0; }
    const std::vector<Span>& kv_heads() const { return kv_heads_; }
    const std::vector<Span>& layers() const { return layers_; }
    std::int64_t peers() const { return peers_.count; }            // hosts that have the layers of this one, with it
    bool divides_layers() const { return peers_.count < size(); }  // between hosts
    int before() const;  // who has the layers before those of this host; -1: nobody
    int after() const;

    // All of them in the first rank of a host alone. False: the team is broken.
    // hidden [kRows, hidden]: whose first rows an order of logits is about. wanted: of these rows.
    bool tell(const TeamOrder& order, const TensorRef& hidden, const WantedLogits& wanted = {});
    // Not in the front: the next order, with its rows, and where blocks [layers, blocks, ...] come before it, these.
    bool hear(TeamOrder& order, const TensorRef& hidden, const TensorRef& arena);
    // In the front, before a step: blocks ids i64 [m], as they are now, to the other hosts: to each its layers and
    // heads. Throws if the team is broken.
    void mirror(const TensorRef& arena, const TensorRef& ids);

    // Memory of the ranks of this host, u8 [bytes], in which adapters lie as at the front. Without it none run.
    void keep_adapters(const TensorRef& memory);
    // In the front, before an order: some bytes of that memory, to all others.
    bool tell_adapters(const Span& bytes);

    bool exchange(std::initializer_list<Columns> columns);
    // The front gets of others what it wanted with the last order; those change what they have.
    bool collect(const Columns& logits);
    // The same of a tensor [rows, width], with what each host has of its columns.
    bool exchange(const TensorRef& columns, const std::vector<Span>& spans);
    bool collect(const TensorRef& logits, const std::vector<Span>& spans);

    // states [tokens, hidden]: to the next stage's host, and from the one before.
    bool send_states(const TensorRef& states);
    bool receive_states(const TensorRef& states);
    // After `parts` parts of a step. states: of the whole step. kv: of all layers.
    bool end_step(const TeamStep& step, std::int64_t parts, const std::vector<KvPages>& kv, const TensorRef& states);
    // The same, with what a caller may do wrong refused.
    bool end_step(const TeamOrder& order, std::int64_t parts, const std::vector<KvCache>& kv, const TensorRef& states);

    void check_arena(const TensorRef& arena) const;

  private:
    // What a host has of blocks: some layers of an arena, and some bytes of a block in each.
    struct Slice {
        TensorRef layers;
        std::int64_t begin, bytes;
        std::int64_t block_bytes() const { return layers.shape[0] * bytes; }
    };

    void check_layers() const;
    std::int64_t all_heads() const;
    Columns columns_of(const TensorRef& columns, const std::vector<Span>& spans) const;
    Slice slice_of(const TensorRef& arena, int host) const;
    bool take_wanted(const TeamOrder& order);
    bool hear_said(Frame frame, std::int64_t most_bytes, int host, std::vector<char>& said);
    bool ask(const Columns& logits);
    bool answer(const Columns& logits);
    bool take_blocks(const TensorRef& arena, std::int64_t bytes);
    bool take_adapter(std::int64_t bytes);
    bool tell_end(const TeamStep& step, const std::vector<KvPages>& kv, const TensorRef& states);
    bool hear_end(const TeamStep& step, const std::vector<KvPages>& kv, const TensorRef& states);

    Team& team_;
    HostLinks links_;
    std::vector<Span> kv_heads_, layers_;
    Span peers_;
    WantedLogits wanted_;
    TensorRef adapters_;  // the memory in which they lie
};

}  // namespace octavo
