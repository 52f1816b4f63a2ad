#include "simt/instructions.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace octavo::cuda {
namespace {

void arrive(const simt::Copy& copy) {
    if (copy.valid) {
        std::memcpy(copy.to, copy.from, 16);
    } else {
        std::memset(copy.to, 0, 16);
    }
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace

std::uint16_t half_of_fp8(std::uint8_t x, bool e5m2) {
    if (e5m2) {
        return static_cast<std::uint16_t>(x << 8);
    }
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    if ((x & 0x7f) == 0x7f) {
        return 0x7fff;
    }
    const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    Half y;
    from_float(static_cast<float>(x & 0x80 ? -size : size), y);
    return y.bits;
}

namespace {

// What the codes from 0 on mean.
std::vector<double> fp8_sizes(bool e5m2) {
    std::vector<double> sizes;
    for (int code = 0; code <= (e5m2 ? 0x7b : 0x7e); ++code) {
        sizes.push_back(to_float(Half{half_of_fp8(static_cast<std::uint8_t>(code), e5m2)}));
    }
    return sizes;
}

}  // namespace

// The nearest of the numbers there are, the even one of two.
std::uint8_t fp8_of_float(float x, bool e5m2) {
    static const std::vector<double> all[] = {fp8_sizes(false), fp8_sizes(true)};
    if (std::isnan(x)) {
        return 0x7f;
    }
    const std::vector<double>& sizes = all[e5m2];
    const double size = std::fmin(std::fabs(static_cast<double>(x)), sizes.back());
    auto code = std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin();
    if (code > 0) {
        const double below = size - sizes[static_cast<std::size_t>(code) - 1];
        const double above = sizes[static_cast<std::size_t>(code)] - size;
        code -= below < above || (below == above && code % 2 == 1) ? 1 : 0;
    }
    return static_cast<std::uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

void copy_async16(void* to, const void* from, bool valid) {
    if (!aligned(to) || (valid && !aligned(from))) {
        simt::die("a copy of 16 bytes that is not aligned");
    }
    simt::Copy copy{to, from, valid, simt::chance() % 2 == 0};
    if (copy.arrived) {
        arrive(copy);
    }
    if (simt::Arrival* arrival = simt::arrival_at(to)) {
        *arrival = {simt::self, false, 0, 0};
    }
    simt::self->open.push_back(copy);
}

void load_shared_results(const float* p, float (&x)[4]) {
    if (!aligned(p)) {
        simt::die("a load of 16 bytes that is not aligned");
    }
    std::memcpy(x, p, sizeof x);
}

void commit_copies() {
    simt::self->groups.push_back(std::move(simt::self->open));
    simt::self->open.clear();
}

void wait_copies_but(std::size_t pending) {
    auto& groups = simt::self->groups;
    while (groups.size() > pending) {
        for (const simt::Copy& copy : groups.front()) {
            if (!copy.arrived) {
                arrive(copy);
            }
            simt::Arrival* arrival = simt::arrival_at(copy.to);
            if (arrival != nullptr && arrival->by == simt::self) {
                *arrival = {simt::self, true, simt::self->block->barriers, simt::self->warp->barriers};
            }
        }
        groups.erase(groups.begin());
    }
}

namespace {

// The barrier there, which the thread that runs has seen made.
simt::Barrier& barrier_at(BulkBarrier* place) {
    auto& known = simt::self->block->shared_barriers;
    const auto found = known.find(place);
    if (found == known.end()) {
        simt::die("a barrier that was never made");
    }
    simt::Barrier& barrier = found->second;
    if (barrier.maker != simt::self && barrier.made_at == simt::self->block->barriers) {
        simt::die("a barrier that the thread block may not have seen yet");
    }
    return barrier;
}

}  // namespace

void make_barrier(BulkBarrier* barrier, unsigned arrivals) {
    const int count = static_cast<int>(arrivals);
    simt::self->block->shared_barriers[barrier] = {count, count, 0, 0, simt::self, simt::self->block->barriers, false};
}
void publish_barriers() {
    for (auto& [place, barrier] : simt::self->block->shared_barriers) {
        barrier.published = barrier.published || barrier.maker == simt::self;
    }
}
void arrive(BulkBarrier* place) { arrive_expecting(place, 0); }
void arrive_expecting(BulkBarrier* place, unsigned bytes) {
    simt::Barrier& barrier = barrier_at(place);
    if (barrier.pending == 0) {
        simt::die("more threads arrive at a barrier than it was made for");
    }
    barrier.bytes += bytes;
    --barrier.pending;
    simt::end_phase(barrier);
}
void wait_for_phase(BulkBarrier* barrier, unsigned parity) { simt::spin(barrier_at(barrier), parity); }
void copy_bulk(void* to, const void* from, unsigned bytes, BulkBarrier* place) {
    simt::Barrier& barrier = barrier_at(place);
    if (!aligned(to) || !aligned(from) || bytes % 16 != 0) {
        simt::die("a copy in bulk that is not aligned");
    }
    if (!barrier.published) {
        simt::die("a copy in bulk for a barrier that was not published");
    }
    simt::self->block->bulk.push_back({to, from, bytes, &barrier});
}

namespace {

struct MatrixLoad {
    const void* row;
    std::uint32_t result[4];
};

template <bool kTransposed>
void gather_matrices(void** all) {
    for (int lane = 0; lane < 32; ++lane) {
        simt::require_arrived(static_cast<MatrixLoad*>(all[lane])->row);
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int m = 0; m < 4; ++m) {
            std::uint16_t pair[2];
            for (int i = 0; i < 2; ++i) {
                const int row = kTransposed ? 2 * (lane % 4) + i : lane / 4;
                const int column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
                const void* from = static_cast<MatrixLoad*>(all[8 * m + row])->row;
                std::memcpy(&pair[i], static_cast<const std::uint16_t*>(from) + column, 2);
            }
            static_cast<MatrixLoad*>(all[lane])->result[m] = static_cast<std::uint32_t>(pair[1]) << 16 | pair[0];
        }
    }
}

MatrixLoad matrix_row(const void* row) {
    if (!aligned(row)) {
        simt::die("a matrix row that is not aligned");
    }
    return {row, {}};
}

}  // namespace

void load_matrices(std::uint32_t (&r)[4], const void* row) {
    MatrixLoad load = matrix_row(row);
    simt::rendezvous(simt::Lanes::kTogether, "ldmatrix", &load, gather_matrices<false>);
    std::memcpy(r, load.result, sizeof r);
}
void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
    MatrixLoad load = matrix_row(row);
    simt::rendezvous(simt::Lanes::kTogether, "ldmatrix.trans", &load, gather_matrices<true>);
    std::memcpy(r, load.result, sizeof r);
}
std::uint32_t transpose_matrix(std::uint32_t x) {
    std::uint32_t both[2] = {x, 0};
    simt::rendezvous(simt::Lanes::kTogether, "movmatrix", both, [](void** all) {
        for (int lane = 0; lane < 32; ++lane) {
            std::uint32_t result = 0;
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * (lane % 4) + i, column = lane / 4;
                const std::uint32_t pair = static_cast<std::uint32_t*>(all[4 * row + column / 2])[0];
                result |= (pair >> 16 * (column % 2) & 0xffffU) << 16 * i;
            }
            static_cast<std::uint32_t*>(all[lane])[1] = result;
        }
    });
    return both[1];
}

namespace {

struct MatrixProduct {
    float* c;
    const std::uint32_t* a;
    std::uint32_t b[2];
};

// What one register holds of a row of a, or of a column of b: neighbours of k.
template <typename T>
void unpack(std::uint32_t x, float (&values)[2]) {
    values[0] = low_of<T>(x);
    values[1] = high_of<T>(x);
}
template <typename T>
void unpack(std::uint32_t x, float (&values)[4]) {
    for (int i = 0; i < 4; ++i) {
        values[i] = to_float(Half{half_of_fp8(static_cast<std::uint8_t>(x >> 8 * i), false)});
    }
}

// As PTX says where the parts of m16n8k16 lie (kEach = 2, 16 bits), and those of m16n8k32 (kEach = 4, 8 bits). Products
// of e4m3 are exact in float32; sums are rounded to float32 one by one, in the order of k, from zero, and c is added
// last. Devices add in other orders, and those with an instruction for fp8 with fewer bits.
template <typename T, int kEach>
void multiply_matrices(void** all) {
    constexpr int kDepth = 8 * kEach;
    float a[16][kDepth], b[kDepth][8], c[16][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
        const auto* one = static_cast<MatrixProduct*>(all[lane]);
        const int g = lane / 4, t = lane % 4;
        float values[kEach];
        for (int i = 0; i < 4; ++i) {
            unpack<T>(one->a[i], values);
            std::copy_n(values, kEach, &a[g + 8 * (i % 2)][kEach * t + 4 * kEach * (i / 2)]);
        }
        for (int i = 0; i < 2; ++i) {
            unpack<T>(one->b[i], values);
            for (int j = 0; j < kEach; ++j) {
                b[kEach * t + 4 * kEach * i + j][g] = values[j];
            }
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < kDepth; ++k) {
            for (int column = 0; column < 8; ++column) {
                c[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            static_cast<MatrixProduct*>(all[lane])->c[i] += c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
        }
    }
}

}  // namespace

template <typename T>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    MatrixProduct mine{c, a, {b0, b1}};
    simt::rendezvous(simt::Lanes::kTogether, "mma", &mine, multiply_matrices<T, 2>);
}
template void multiply_add<Half>(float (&)[4], const std::uint32_t (&)[4], std::uint32_t, std::uint32_t);
template void multiply_add<BFloat>(float (&)[4], const std::uint32_t (&)[4], std::uint32_t, std::uint32_t);
void multiply_add_e4m3(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    MatrixProduct mine{c, a, {b0, b1}};
    simt::rendezvous(simt::Lanes::kTogether, "mma", &mine, multiply_matrices<void, 4>);
}

}  // namespace octavo::cuda
