// A decoder of the Llama family that computes a whole step in one call. gpu_worker/models/decoders/llama.py is its
// definition.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "octavo/api.h"
#include "octavo/group_hosts.h"

namespace octavo {

struct KvPages;
class LoraRoom;
class TeamRoom;

// Of attention with one latent for all heads, which pages hold behind what is rotated of a key.
struct LatentSizes {
    std::int64_t rank = 0;                            // numbers of a latent; 0: each head has keys and values
    std::int64_t query_rank = 0;                      // of what queries are made of; 0: of the states themselves
    std::int64_t rotated = 0, plain = 0, values = 0;  // dimensions of a head: of its queries, and of its values
    float eps = 0;                                    // of the norms of latents
};

struct LlamaSizes {
    std::int64_t vocab = 0, hidden = 0, inner = 0, heads = 0, kv_heads = 0, head_dim = 0;
    float eps = 0, scale = 0;
    float embedding_scale = 1;     // what embeddings are multiplied with
    std::int64_t asked_inner = 0;  // inner states of all the experts that a token asks; 0: there are none
    bool gelu = false;             // gates are of GELU (by tanh), not SiLU
    float attention_cap = 0;       // soft caps of scores and logits, as in AttentionOptions; 0: none
    float logit_cap = 0;
    bool post_norms = false;  // layers norm what attention and MLP give before it is added
    float sum_scale = 1;      // what that is multiplied with
    float logit_divisor = 1;
    LatentSizes latent;  // then kv_heads is 1, and head_dim what a page holds of a token

    // Columns of `out`.
    std::int64_t attended() const { return heads * (latent.rank > 0 ? latent.values : head_dim); }
    // Whether what attention and MLP give lies apart before it is added.
    bool sums_apart() const { return post_norms || sum_scale != 1.0F; }
};

// What one of several ranks computes: the attention of some heads, and some rows of every matrix. No sum is ever split:
// a rank computes the whole of what it computes, from inputs that the others have left in the team's memory. So a
// result has the same bits whatever the number of ranks.
//
// The stages of a group compute a step in two parts, so that one has the second while the next one has the first. A
// host has some whole stages, or a stage has some whole hosts.
struct LlamaShare {
    Team* team = nullptr;                     // null: there is one rank, which computes everything
    std::int64_t tokens = 0, plan_bytes = 0;  // of a step, at most: the same in all ranks
    Span kv_heads;                            // whose attention it computes, with their query heads
    // Where ranks of a host do not have whole KV heads each: the heads of queries, of keys and of values in the own
    // products. `kv_heads` are then those of the host, whose attention its ranks of a stage share. Else empty.
    std::vector<Span> heads;
    Span hidden, inner, vocab;
    Span expert_inner, shared_inner;  // of each expert, and of the one that all tokens ask
    Span layers;                      // of its stage
    GroupHosts* hosts = nullptr;      // null: all ranks are on one host, and the spans of hosts are not looked at
    LoraRoom* loras = nullptr;        // null: no adapter runs in the group
    std::vector<Span> host_hidden, host_inner, host_vocab, host_expert_inner, host_shared_inner;
};

// Matrices one below the other, of any formats that round their inputs alike.
using Stack = std::vector<Weight>;

// Many MLPs, of which each token asks a few. A layer whose router is empty has none.
struct Experts {
    Stack router;           // [experts, hidden]
    TensorRef router_bias;  // [experts]
    Stack gate_up, down;    // of each expert: [2 inner, hidden], or two [inner, hidden]; and [hidden, inner]
    TensorRef gate_up_bias, down_bias;               // [experts, 2 inner], [experts, hidden]
    Stack shared_gate_up, shared_down, shared_gate;  // of one that all tokens ask; the last is [1, hidden], or none
    std::int64_t top = 0;                            // how many experts a token asks
    bool sigmoid = false;                            // shares are sigmoids of scores; else a softmax over all
    bool shares_sum_to_one = false;                  // those of the asked ones; else those of all
    float share_scale = 1;                           // what shares are multiplied with
    TensorRef correction;                            // [experts]: added to shares where experts are chosen
    // Experts are chosen from the best groups, each by its best one or by the sum of its best two.
    std::int64_t groups = 1, top_groups = 1, best_per_group = 2;
    float alpha = 0, limit = 0;  // of gates (Kernels::clamped_swiglu); 0: SiLU
};

// The tensors of a layer. Vectors are f32; a vector without data is not there.
struct LlamaLayer {
    TensorRef input_norm, mlp_norm;        // [hidden]; not given: products take the states as they are
    TensorRef attended_norm, output_norm;  // [hidden], of what attention and MLP give, with post_norms
    // [(heads + 2 kv_heads) head_dim, hidden]; with latents [query_rank, or heads (rotated + plain), and then rotated +
    // rank, hidden]
    Stack qkv;
    Stack queries;                     // [heads (rotated + plain), query_rank]
    Stack latent_keys, latent_values;  // [heads rank, plain], [heads values, rank]: one matrix
    Stack out;                         // [hidden, attended()]
    Stack gate_up;                     // [2 inner, hidden]
    Stack down;                        // [hidden, inner]
    TensorRef qkv_bias, out_bias, gate_up_bias, down_bias;
    TensorRef q_norm, k_norm;  // [head_dim], or of all heads together, or [query_rank] and [rank]
    TensorRef sinks;           // [heads]: scores without values that take part in the softmax
    std::int64_t window = 0;
    BlockSparse sparse;
    bool rotated = true;
    TensorRef cos, sin;  // the layer's own angles, as wide as the model's; not given: those
    Experts experts;     // in the place of gate_up and down
};

// What an adapter adds to a stack's products of x: y[first + row] += sum over k of b[k, row] * (scale * a[k] . x).
// Without parts nothing is added.
struct LoraStack {
    Weight a;  // plain [sum of ranks, columns of the stack]
    std::vector<LoraPart> parts;
};

struct LoraLayer {
    LoraStack qkv, out, gate_up, down;
};

// A low-rank adapter. It refers to the memory of its tensors, which must outlive it.
struct Lora {
    float scale = 1;
    std::vector<LoraLayer> layers;
    std::int64_t number = 0, place = 0;  // in a LoraRoom; 0: it is in none
};

// So many of a step's `lora_rows` run with this adapter.
struct LoraGroup {
    const Lora* lora;
    std::int64_t count;
};

// Of a step that has a sequence with pictures; else not given.
struct LlamaPictures {
    TensorRef rows;  // i64 [p], ascending: the tokens that show one
    TensorRef
        states;  // f32 [p, (1 + n) hidden]: what stands for their embeddings, and is added after the first n layers
    TensorRef cos, sin;  // f32 [t, rotated dimensions]: angles of each token, in the place of the model's
};

struct LlamaStep : TeamStep {
    std::vector<LoraGroup> loras;
    LlamaPictures pictures;
};

// Only one thread may use it at a time. It refers to the memory of its tensors, which must outlive it.
class Llama {
  public:
    // cos, sin f32 [positions, rotated dimensions]. With a share, head and layers have its rows alone: those of its
    // query heads, then of its keys and of its values; of each gate, then of what it gates.
    Llama(const LlamaSizes& sizes, const Weight& embedding, const Weight& head, const TensorRef& norm,
          const TensorRef& cos, const TensorRef& sin, std::vector<LlamaLayer> layers, const LlamaShare& share = {});
    ~Llama();

    // How many bytes of memory a team of this model needs.
    static std::int64_t team_bytes(const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes);

    // kv: one cache per layer. hidden f32 [r, hidden]: normed hidden states, which `logits` takes.
    void forward(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvCache>& kv);

    // In a rank other than the front's: takes part in what that calls, until the team is broken. In the front's forward
    // and logits throw if it is. arena [layers, blocks, ...]: where the first rank of a host puts the front's blocks.
    void serve(const std::vector<KvCache>& kv, const TensorRef& arena);

    // ArgumentError unless the adapter's matrices have the shapes of this model's.
    void check_lora(const Lora& lora) const;

    // out f32 [r, vocab] of hidden f32 [r, hidden]. wanted: what is needed of them, at least.
    void logits(const TensorRef& out, const TensorRef& hidden, const WantedLogits& wanted = {}) const;
    // In a group: where those of some rows are made; an `out` at its beginning need not be copied. Else not given.
    TensorRef shared_logits() const;

  private:
    struct Workspace;
    struct Part;
    class Run;

    void check_model() const;
    void check_head_norms(const LlamaLayer& layer) const;
    void check_latents() const;
    void check_latent(const LlamaLayer& layer) const;
    void check_heads() const;
    void check_experts_share(const Experts& experts) const;
    void check_hosts() const;
    void check(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvPages>& kv) const;
    void check_pictures(const LlamaPictures& pictures, std::int64_t num_tokens) const;
    void run(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvPages>& kv);
    bool normed_together(const LlamaLayer& layer) const;
    bool shares_attention() const { return !share_.heads.empty(); }  // with other ranks of this host
    // Heads of the own products.
    Span queries() const;
    Span keys() const { return shares_attention() ? share_.heads[1] : share_.kv_heads; }
    Span values() const { return shares_attention() ? share_.heads[2] : share_.kv_heads; }
    std::int64_t qkv_rows() const;  // of the own products
    // Into how many groups the attention of a step divides the heads that share a latent, so that all threads have
    // work.
    std::int64_t latent_groups(std::int64_t sequences) const;
    std::int64_t group() const { return sizes_.heads / sizes_.kv_heads; }
    bool all_have_heads() const;  // of the ranks that divide those of this one
    void share_of_logits(std::int64_t rows) const;
    void linear_logits(const TensorRef& out, const TensorRef& hidden) const;
    void order_forward(const LlamaStep& step) const;
    LlamaStep own_step(LlamaStep step, const TensorRef& lora_groups) const;
    void tell_order(const WantedLogits& wanted = {}) const;
    bool speaks() const { return share_.hosts != nullptr && share_.hosts->speaks(); }  // with other hosts
    bool is_staged() const;
    TensorRef states(std::int64_t first, std::int64_t count) const;

    LlamaSizes sizes_;
    LlamaShare share_;
    std::vector<Span> host_attended_, host_keys_;  // columns of activations
    Weight embedding_, head_;
    TensorRef norm_, cos_, sin_;
    std::vector<LlamaLayer> layers_;
    std::unique_ptr<Workspace> space_;
    std::unique_ptr<TeamRoom> room_;
};

}  // namespace octavo
