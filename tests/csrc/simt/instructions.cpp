#include "simt/instructions.h"

#include <utility>

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

// The nearest of the numbers there are, the even one of two.
std::uint8_t fp8_of_float(float x, bool e5m2) {
    if (std::isnan(x)) {
        return 0x7f;
    }
    const int last = e5m2 ? 0x7b : 0x7e;
    const double size = std::fmin(std::fabs(static_cast<double>(x)), e5m2 ? 57344 : 448);
    int best = 0;
    double nearest = size;
    for (int i = 1; i <= last; ++i) {
        const double gap = std::fabs(size - to_float(Half{half_of_fp8(static_cast<std::uint8_t>(i), e5m2)}));
        if (gap < nearest || (gap == nearest && i % 2 == 0)) {
            best = i;
            nearest = gap;
        }
    }
    return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
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

template <typename T>
void multiply_matrices(void** all) {
    float a[16][16], b[16][8], c[16][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
        const auto* one = static_cast<MatrixProduct*>(all[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)] = low_of<T>(one->a[i]);
            a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + 1] = high_of<T>(one->a[i]);
        }
        for (int i = 0; i < 2; ++i) {
            b[2 * t + 8 * i][g] = low_of<T>(one->b[i]);
            b[2 * t + 8 * i + 1][g] = high_of<T>(one->b[i]);
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
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
    simt::rendezvous(simt::Lanes::kTogether, "mma", &mine, multiply_matrices<T>);
}
template void multiply_add<Half>(float (&)[4], const std::uint32_t (&)[4], std::uint32_t, std::uint32_t);
template void multiply_add<BFloat>(float (&)[4], const std::uint32_t (&)[4], std::uint32_t, std::uint32_t);

}  // namespace octavo::cuda
