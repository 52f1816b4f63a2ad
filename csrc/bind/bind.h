#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "octavo/api.h"

namespace octavo {

void bind_ops(pybind11::module_& module);

namespace ref {
void bind_ops(pybind11::module_& module);
}

}  // namespace octavo

namespace octavo::bind {

// local_blocks, vert_stride, block_size, head_sliding_step, tp_rank; nothing: not sparse.
BlockSparse block_sparse(const std::vector<std::int64_t>& given);

void bind_cache(pybind11::module_& module);
void bind_weights(pybind11::module_& module);
void bind_layer_program(pybind11::module_& module);
void bind_llama(pybind11::module_& module);
void bind_attention_plan(pybind11::module_& module);
void bind_part_sum(pybind11::module_& module);
void bind_team(pybind11::module_& module);

}  // namespace octavo::bind
