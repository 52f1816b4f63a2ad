// Kernels that write keys and values into blocks, move and checksum whole blocks, and convert 8-bit numbers.
#pragma once

#include <type_traits>

#include "common/fault.cuh"
#include "common/pages.cuh"
#include "octavo/checksum.h"
#include "rows.cuh"

namespace octavo::cuda {

constexpr int kCacheThreads = 256;

template <typename T>
struct WriteParams {
    const T* keys;  // [tokens, kv_head, head_dim]
    const T* values;
    const std::int64_t* slots;  // [tokens]; outside [0, num_slots): not written, and told unless negative
    std::int64_t key_token, key_head, value_token, value_head, num_slots;
    KvPages kv;
    KvScales scales;
    FaultWord fault;
    int num_heads, head_dim;
    bool whole;  // eights can be moved in pieces, here and there
};

// Rounded once: with 1 / scale, numbers halfway between two of 8 bits would go astray.
__device__ __forceinline__ float divided(float x, float scale) { return scale == 1.0F ? x : x / scale; }

template <typename C>
__device__ __forceinline__ void write_eight(const Pages& pages, std::int64_t place, int dim, const Eight<C>& x, int n,
                                            bool whole) {
    C* to = static_cast<C*>(pages.data) + place;
    if (whole) {
        store_eight(to + pages.dimension(dim), x, true);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < n) {
            to[pages.dimension(dim + j)] = x.at[j];
        }
    }
}

// Eight dimensions of a key or value.
template <typename T, typename C>
__device__ __forceinline__ void write_piece(const T* from, const Pages& pages, std::int64_t place, int dim, int n,
                                            float scale, bool whole) {
    Eight<C> y;
    Eight<T> x{};
    if (whole) {
        x = load_eight(from + dim, true);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x.at[j] = j < n ? from[dim + j] : T{};
        }
    }
    float numbers[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        numbers[j] = divided(to_float(x.at[j]), scale);
    }
    from_floats(numbers, y.at);
    write_eight<C>(pages, place, dim, y, n, whole);
}

// By a warp: a key or value in int8 and its scale, with which the largest number is 127, as far as float16 goes. One
// whose numbers are not all finite: zeros times NaN.
template <typename T>
__device__ __forceinline__ void write_scaled(const T* from, const Pages& pages, std::int64_t place, int head_dim,
                                             Half& scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::uint32_t top = 0;  // as bits: NaN is above all
    for (int d = lane; d < head_dim; d += 32) {
        const std::uint32_t size = bits_of(to_float(from[d])) & 0x7fffffffU;
        top = size > top ? size : top;
    }
    constexpr std::uint32_t kInfinity = 0x7f800000U;
    constexpr float kLargestHalf = 65504.0F;
    top = reduce_warp(top, Larger{});
    Half kept{0x7e00};
    if (top < kInfinity) {
        from_float(fminf(float_of(top) / 127.0F, kLargestHalf), kept);
    }
    const float divisor = to_float(kept);
    for (int d = lane; d < head_dim; d += 32) {
        const float x = divisor > 0.0F ? to_float(from[d]) / divisor : 0.0F;
        from_float(x, static_cast<std::int8_t*>(pages.data)[place + pages.dimension(d)]);
    }
    if (lane == 0) {
        scale = kept;
    }
}

// By a block: each warp takes keys or values of some heads.
template <typename T>
__device__ __forceinline__ void write_token_scaled(const WriteParams<T>& p, std::int64_t token, const T* keys,
                                                   std::int64_t block, int slot) {
    const int warps = static_cast<int>(blockDim.x) / 32;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < 2 * p.num_heads; i += warps) {
        const int head = i / 2;
        const bool is_key = i % 2 == 0;
        const T* from = is_key ? keys + head * p.key_head : p.values + token * p.value_token + head * p.value_head;
        const Pages pages = is_key ? p.kv.keys : p.kv.values;
        write_scaled(from, pages, pages.offset(block, head, slot), p.head_dim,
                     (is_key ? p.scales.key_slots : p.scales.value_slots).at(block, head, slot));
    }
}

template <typename T, typename C>
__device__ __forceinline__ void write_token(const WriteParams<T>& p, std::int64_t token, const T* keys) {
    const std::int64_t slot = p.slots[token];
    if (slot < 0 || slot >= p.num_slots) {
        if (slot >= 0) {
            tell(p.fault, Fault::kSlots);
        }
        return;
    }
    const std::int64_t block = slot / p.kv.block_size;
    const int place = static_cast<int>(slot % p.kv.block_size), pieces = (p.head_dim + 7) / 8;
    if constexpr (std::is_same_v<C, std::int8_t>) {
        if (p.scales.key_slots.data) {
            write_token_scaled(p, token, keys, block, place);
            return;
        }
    }
    for (int i = static_cast<int>(threadIdx.x); i < p.num_heads * pieces; i += static_cast<int>(blockDim.x)) {
        const int head = i / pieces, dim = 8 * (i % pieces), n = p.head_dim - dim;
        write_piece<T, C>(keys + head * p.key_head, p.kv.keys, p.kv.keys.offset(block, head, place), dim, n,
                          p.scales.key(head), p.whole);
        write_piece<T, C>(p.values + token * p.value_token + head * p.value_head, p.kv.values,
                          p.kv.values.offset(block, head, place), dim, n, p.scales.value(head), p.whole);
    }
}

template <typename T, typename C>
__global__ void __launch_bounds__(kCacheThreads) cache_write_kernel(const WriteParams<T> p) {
    write_token<T, C>(p, blockIdx.x, p.keys + blockIdx.x * p.key_token);
}

template <typename T, typename A>
struct RopeParams {
    WriteParams<T> write;
    T* queries;                     // [tokens, heads, head_dim], rotated in place
    const std::int64_t* positions;  // [tokens] or null: rows of angles are tokens
    const A* cos;                   // [positions, half]
    const A* sin;
    std::int64_t query_token, query_head, cos_row, sin_row, num_angles;
    int num_query_heads, half;
    bool interleaved;
};

// A block per token: its queries are rotated in place; its keys, in shared memory, on their way into the cache.
template <typename T, typename C, typename A>
__global__ void __launch_bounds__(kCacheThreads) rope_cache_write_kernel(const RopeParams<T, A> p) {
    const WriteParams<T>& w = p.write;
    const std::int64_t token = blockIdx.x;
    const std::int64_t row = p.positions ? p.positions[token] : token;
    if (!is_one_of(row, p.num_angles, w.fault, Fault::kPositions)) {
        return;
    }
    const A* cos = p.cos + row * p.cos_row;
    const A* sin = p.sin + row * p.sin_row;
    auto* keys = reinterpret_cast<T*>(shared_memory());
    const int threads = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.x); i < w.num_heads * w.head_dim; i += threads) {
        keys[i] = w.keys[token * w.key_token + i / w.head_dim * w.key_head + i % w.head_dim];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < w.num_heads * p.half; i += threads) {
        rotate_pair(keys + i / p.half * w.head_dim, i % p.half, p.half, p.interleaved, cos, sin);
    }
    for (int i = static_cast<int>(threadIdx.x); i < p.num_query_heads * p.half; i += threads) {
        T* head = p.queries + token * p.query_token + i / p.half * p.query_head;
        rotate_pair(head, i % p.half, p.half, p.interleaved, cos, sin);
    }
    __syncthreads();
    WriteParams<T> local = w;
    local.key_head = w.head_dim;
    write_token<T, C>(local, token, keys);
}

// Whole blocks as bytes, in pieces of 16, 8, 4 or 1.
struct MoveParams {
    const unsigned char* from;
    unsigned char* to;
    const std::int64_t* pairs;  // [n, 2]: from, to; or
    const std::int64_t* ids;    // [n]: one side is a block, the other the place in the list
    std::int64_t from_layer, from_block, to_layer, to_block, length;  // in bytes
    std::int64_t num_from, num_to;                                    // blocks, or places in the list
    FaultWord fault;
    int num_items, num_layers;
    bool gather;  // ids name blocks of `from`, else of `to`
};

template <typename P>
__global__ void __launch_bounds__(kCacheThreads) move_blocks_kernel(const MoveParams p) {
    const std::int64_t pieces = p.length / static_cast<std::int64_t>(sizeof(P));
    const std::int64_t runs = std::int64_t{p.num_items} * p.num_layers;
    for (std::int64_t run = blockIdx.x; run < runs; run += gridDim.x) {
        const std::int64_t item = run / p.num_layers, layer = run % p.num_layers;
        const std::int64_t from_block = p.pairs ? p.pairs[2 * item] : p.gather ? p.ids[item] : item;
        const std::int64_t to_block = p.pairs ? p.pairs[2 * item + 1] : p.gather ? item : p.ids[item];
        const Fault fault = p.pairs ? Fault::kPairs : Fault::kBlockIds;
        if (!is_one_of(from_block, p.num_from, p.fault, fault) || !is_one_of(to_block, p.num_to, p.fault, fault)) {
            continue;
        }
        const P* from = reinterpret_cast<const P*>(p.from + layer * p.from_layer + from_block * p.from_block);
        P* to = reinterpret_cast<P*>(p.to + layer * p.to_layer + to_block * p.to_block);
        const std::int64_t step = std::int64_t{blockDim.x} * gridDim.y;
        std::int64_t i = blockIdx.y * std::int64_t{blockDim.x} + threadIdx.x;
        for (; i + 3 * step < pieces; i += 4 * step) {  // four on their way before the first is needed
            P some[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                some[j] = from[i + j * step];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                to[i + j * step] = some[j];
            }
        }
        for (; i < pieces; i += step) {
            to[i] = from[i];
        }
    }
}

struct ChecksumParams {
    const unsigned char* arena;  // [layers, blocks, bytes]
    const std::int64_t* ids;
    std::uint64_t* out;
    std::int64_t layer, block, length;  // strides, and a block's bytes in a layer
    std::int64_t num_blocks;
    FaultWord fault;
    int num_layers;
    bool aligned;  // layers of blocks begin at multiples of 8 bytes
};

// Eight bytes, or the `left` there are and zeros.
__device__ __forceinline__ std::uint64_t load_word(const unsigned char* from, std::int64_t left, bool aligned) {
    if (aligned && left >= checksum::kWordBytes) {
        return *reinterpret_cast<const std::uint64_t*>(from);
    }
    std::uint64_t word = 0;
    for (int i = 0; i < 8 && i < left; ++i) {
        word |= static_cast<std::uint64_t>(from[i]) << 8 * i;
    }
    return word;
}

static __global__ void __launch_bounds__(kCacheThreads) checksum_kernel(const ChecksumParams p) {
    const std::int64_t id = p.ids[blockIdx.x];
    const bool known = is_one_of(id, p.num_blocks, p.fault, Fault::kBlockIds);
    const unsigned char* block = p.arena + (known ? id * p.block : 0);
    const std::int64_t words = checksum::words_of(p.length);
    std::uint64_t sum = 0;
    for (int layer = 0; layer < (known ? p.num_layers : 0); ++layer) {
        for (std::int64_t i = threadIdx.x; i < words; i += blockDim.x) {
            const std::int64_t begin = i * checksum::kWordBytes;
            const std::uint64_t word = load_word(block + layer * p.layer + begin, p.length - begin, p.aligned);
            sum += checksum::mixed(word, layer * words + i);
        }
    }
    sum = reduce_block(sum, reinterpret_cast<std::uint64_t*>(shared_memory()), Add{});
    if (threadIdx.x == 0) {
        p.out[blockIdx.x] = sum;
    }
}

// whole: eights can be moved in pieces, here and there. Those of int8 are not: their divisions would spill registers.
template <bool kNarrow, typename From, typename To>
__global__ void __launch_bounds__(kCacheThreads)
    convert_kernel(const From* from, To* to, std::int64_t count, float scale, bool whole) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x, first = blockIdx.x * std::int64_t{blockDim.x};
    constexpr bool kFp8 = kIsFp8<std::conditional_t<kNarrow, To, From>>;
    const std::int64_t eights = kFp8 && whole ? count / 8 : 0;
    for (std::int64_t i = first + threadIdx.x; i < eights; i += step) {
        float x[8];
        Eight<To> y;
        to_floats(load_eight(from + 8 * i, true).at, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[j] = kNarrow ? divided(x[j], scale) : x[j] * scale;
        }
        from_floats(x, y.at);
        store_eight(to + 8 * i, y, true);
    }
    for (std::int64_t i = 8 * eights + first + threadIdx.x; i < count; i += step) {
        const float x = to_float(from[i]);
        from_float(kNarrow ? divided(x, scale) : x * scale, to[i]);
    }
}

}  // namespace octavo::cuda
