// Attention with keys and values of each head.
#include <algorithm>

#include "llama_run.h"
#include "rope.h"

namespace octavo {

void Llama::Run::attend_heads(std::size_t index) {
    const LlamaLayer& layer = m_.layers_[index];
    if (qkv_row() > 0) {
        norm(layer.input_norm, layer.qkv, m_.all_have_heads());
        const Adapted adapted{index, &LoraLayer::qkv, 0};
        product(layer.qkv, normed_, layer.qkv_bias, qkv_, qkv_row(), false, &adapted);
    }
    if (share_.team != nullptr && m_.normed_together(layer)) {
        show_heads();
        meet({{queries_, num_tokens_, s_.heads * s_.head_dim, &m_.host_attended_},
              {keys_, num_tokens_, s_.kv_heads * s_.head_dim, &m_.host_keys_}});
    }
    place(layer, m_.space_->own[index]);
    if (m_.shares_attention()) {
        meet();
    }
    attend(layer, m_.space_->own[index]);
    meet({{attended_, num_tokens_, s_.heads * s_.head_dim, &m_.host_attended_}});
}

void Llama::Run::show_heads() {
    const std::int64_t d = s_.head_dim;
    each(qkv_row() > 0 ? num_tokens_ : 0, [&](std::int64_t t) {
        const float* heads = qkv_ + t * qkv_row();
        std::copy_n(heads, own_.queries.count * d, queries_ + (t * s_.heads + own_.queries.first) * d);
        std::copy_n(heads + own_.queries.count * d, own_.keys.count * d,
                    keys_ + (t * s_.kv_heads + own_.keys.first) * d);
    });
}

void Llama::Run::norm_own(const float* all, std::int64_t count, const TensorRef& weight, std::int64_t first,
                          std::int64_t own, float* space, float* to) {
    k_.rms_norm(all, weight.as<float>(), s_.eps, count, space);
    std::copy_n(space + first, own, to);
}

void Llama::Run::place(const LlamaLayer& layer, const KvPages& kv) {
    const std::int64_t d = s_.head_dim, queries = own_.queries.count, keys = own_.keys.count, row = qkv_row();
    const LlamaPictures& pictures = step_.pictures;
    const bool apart = pictures.cos.given();  // the angles of each token
    const TensorRef& cos = apart ? pictures.cos : layer.cos.given() ? layer.cos : m_.cos_;
    const TensorRef& sin = apart ? pictures.sin : layer.sin.given() ? layer.sin : m_.sin_;
    const std::int64_t turning = queries + keys, pairs = m_.cos_.shape[1] / 2, size = kv.block_size;
    each(row > 0 ? num_tokens_ : 0, [&](std::int64_t t) {
        float* heads = qkv_ + t * row;
        const std::int64_t position = apart ? t : step_.positions.as<std::int64_t>()[t];
        const Rope rope{cos.as<float>() + position * cos.stride[0], sin.as<float>() + position * sin.stride[0], pairs,
                        false};
        const bool together = m_.normed_together(layer);
        float* space = thread_.scratch(together ? s_.heads * d : d);
        if (together && share_.team != nullptr) {
            const std::int64_t q = s_.heads * d, k = s_.kv_heads * d;
            norm_own(queries_ + t * q, q, layer.q_norm, own_.queries.first * d, queries * d, space, heads);
            norm_own(keys_ + t * k, k, layer.k_norm, own_.keys.first * d, keys * d, space, heads + queries * d);
        } else if (together) {
            k_.rms_norm(heads, layer.q_norm.as<float>(), s_.eps, queries * d, heads);
            k_.rms_norm(heads + queries * d, layer.k_norm.as<float>(), s_.eps, keys * d, heads + queries * d);
        }
        for (std::int64_t h = 0; h < turning; ++h) {
            float* head = heads + h * d;
            const TensorRef& weight = h < queries ? layer.q_norm : layer.k_norm;
            if (weight.given() && !together) {
                k_.rms_norm(head, weight.as<float>(), s_.eps, d, head);
            }
            if (layer.rotated) {
                turn(k_, rope, head, space);
            }
        }
        const std::int64_t slot = step_.slots.as<std::int64_t>()[t];
        const auto write = [&](const KvSide& side, const Span& own, const float* from) {
            const std::int64_t first = own.first - share_.kv_heads.first;
            for (std::int64_t h = 0; slot >= 0 && h < own.count; ++h) {
                k_.write_slot(kv, side, slot / size, first + h, slot % size, from + h * d);
            }
        };
        write(kv.keys, own_.keys, heads + queries * d);
        write(kv.values, own_.values, heads + turning * d);
        if (m_.shares_attention()) {
            std::copy_n(heads, queries * d, attended_ + (t * s_.heads + own_.queries.first) * d);
        }
    });
}

void Llama::Run::attend(const LlamaLayer& layer, const KvPages& kv) {
    const std::int64_t first = share_.kv_heads.first, group = m_.group();
    if (share_.kv_heads.count == 0) {
        return;
    }
    AttentionJob job = attention_job(kv, share_.kv_heads.count * group);
    job.out = attended_ + first * group * s_.head_dim;
    job.queries = m_.shares_attention() ? job.out : qkv_;
    job.query_token = m_.shares_attention() ? s_.heads * s_.head_dim : qkv_row();
    job.query_head = s_.head_dim;
    job.out_token = s_.heads * s_.head_dim;
    job.out_head = s_.head_dim;
    job.scale = s_.scale;
    job.soft_cap = s_.attention_cap;
    job.window = layer.window;
    job.sinks = layer.sinks.given() ? layer.sinks.as<float>() + first * group : nullptr;
    put_sparse(job, layer.sparse, s_.heads);
    job.sparse_offset += first * (group * job.sparse_head + job.sparse_kv_head);
    part_.plans.at(layer.window).run(thread_, job);
}

}  // namespace octavo
