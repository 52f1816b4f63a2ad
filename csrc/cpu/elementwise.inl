// Norm, activation, rotation, maximum and conversions of one row.

void to_float(DType dtype, const void* from, std::int64_t count, float* to) {
    const std::int64_t whole = count / 8 * 8;
    if (dtype == DType::kF32) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
        return;
    }
    const auto* bytes = static_cast<const std::uint8_t*>(from);
    if (dtype == DType::kE4M3 || dtype == DType::kE5M2 || dtype == DType::kI8) {
        for (std::int64_t i = 0; i < count; ++i) {
            to[i] = dtype == DType::kE4M3   ? e4m3_to_float(bytes[i])
                    : dtype == DType::kE5M2 ? e5m2_to_float(bytes[i])
                                            : static_cast<float>(static_cast<std::int8_t>(bytes[i]));
        }
        return;
    }
    const auto* narrow = static_cast<const std::uint16_t*>(from);
    for (std::int64_t i = 0; i < whole; i += 8) {
        store8(to + i, dtype == DType::kF16 ? load8_f16(narrow + i) : load8_bf16(narrow + i));
    }
    for (std::int64_t i = whole; i < count; ++i) {
        to[i] = dtype == DType::kF16 ? half_to_float(narrow[i]) : bf16_to_float(narrow[i]);
    }
}

void from_float(DType dtype, const float* from, std::int64_t count, void* to) {
    const std::int64_t whole = count / 8 * 8;
    if (dtype == DType::kF32) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
        return;
    }
    auto* bytes = static_cast<std::uint8_t*>(to);
    if (dtype == DType::kE4M3 || dtype == DType::kE5M2 || dtype == DType::kI8) {
        for (std::int64_t i = 0; i < count; ++i) {
            bytes[i] = dtype == DType::kE4M3   ? float_to_e4m3(from[i])
                       : dtype == DType::kE5M2 ? float_to_e5m2(from[i])
                                               : static_cast<std::uint8_t>(float_to_int8(from[i]));
        }
        return;
    }
    auto* narrow = static_cast<std::uint16_t*>(to);
    for (std::int64_t i = 0; i < whole; i += 8) {
        dtype == DType::kF16 ? store8_f16(narrow + i, load8(from + i)) : store8_bf16(narrow + i, load8(from + i));
    }
    for (std::int64_t i = whole; i < count; ++i) {
        narrow[i] = dtype == DType::kF16 ? float_to_half(from[i]) : float_to_bf16(from[i]);
    }
}

void rms_norm(const float* x, const float* weight, float eps, std::int64_t count, float* out) {
    F8 a = zero8(), b = zero8();
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const F8 first = load8(x + i), second = load8(x + i + 8);
        a = fma8(first, first, a);
        b = fma8(second, second, b);
    }
    for (; i < count; i += 8) {
        const F8 some = load8_some(x + i, count - i < 8 ? count - i : 8);
        a = fma8(some, some, a);
    }
    const float scale = 1.0F / sqrtf(sum8(add8(a, b)) / static_cast<float>(count) + eps);
    for (i = 0; i + 8 <= count; i += 8) {
        store8(out + i, mul8(mul8(load8(x + i), set8(scale)), load8(weight + i)));
    }
    for (; i < count; ++i) {
        out[i] = x[i] * scale * weight[i];
    }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, std::int64_t count, float* out) {
    F8 sum = zero8(), squares = zero8();
    for (std::int64_t i = 0; i < count; i += 8) {
        sum = add8(sum, load8(x + i));
    }
    const F8 mean = set8(sum8(sum) / static_cast<float>(count));
    for (std::int64_t i = 0; i < count; i += 8) {
        const F8 apart = sub8(load8(x + i), mean);
        squares = fma8(apart, apart, squares);
    }
    const F8 scale = set8(1.0F / sqrtf(sum8(squares) / static_cast<float>(count) + eps));
    for (std::int64_t i = 0; i < count; i += 8) {
        store8(out + i, fma8(mul8(sub8(load8(x + i), mean), scale), load8(weight + i), load8(bias + i)));
    }
}

inline F8 silu8(F8 x) { return div8(x, add8(set8(1.0F), exp8(sub8(zero8(), x)))); }

void silu_mul(const float* gate, const float* up, std::int64_t count, float* out) {
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        store8(out + i, mul8(silu8(load8(gate + i)), load8(up + i)));
    }
    if (i < count) {
        float rest[8];
        store8(rest, mul8(silu8(load8_some(gate + i, count - i)), load8_some(up + i, count - i)));
        std::memcpy(out + i, rest, static_cast<std::size_t>(count - i) * 4);
    }
}

// x times the chance of a normal number below it, by Abramowitz and Stegun's 7.1.26: within 2e-7 of the whole.
inline F8 gelu8(F8 x) {
    const F8 size = min8(set8(13.0F), max8(sub8(zero8(), x), x)), z = mul8(size, set8(0.707106781F));
    const F8 t = div8(set8(1.0F), fma8(z, set8(0.3275911F), set8(1.0F)));
    F8 p = fma8(t, set8(1.061405429F), set8(-1.453152027F));
    p = fma8(p, t, set8(1.421413741F));
    p = fma8(p, t, set8(-0.284496736F));
    p = fma8(p, t, set8(0.254829592F));
    const F8 beyond = mul8(mul8(p, t), exp8(mul8(sub8(zero8(), z), z)));
    return fma8(mul8(size, set8(-0.5F)), beyond, max8(zero8(), x));
}

// By the tanh that approximates it: x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline F8 gelu_tanh8(F8 x) {
    const F8 cubic = fma8(mul8(mul8(x, x), x), set8(0.044715F), x);
    return div8(x, add8(set8(1.0F), exp8(mul8(set8(-1.59576912F), cubic))));
}

inline F8 activate8(Activation kind, F8 x) {
    switch (kind) {
        case Activation::kRelu:
            return max8(zero8(), x);
        case Activation::kGelu:
            return gelu8(x);
        case Activation::kGeluTanh:
            return gelu_tanh8(x);
        case Activation::kSilu:
            return silu8(x);
    }
    return x;
}

inline F8 sigmoid8(F8 x) { return div8(set8(1.0F), add8(set8(1.0F), exp8(sub8(zero8(), x)))); }

// log(1 + e^x) by log((1 + s) / (1 - s)), where s is at most a third.
inline F8 softplus8(F8 x) {
    const F8 e = exp8(sub8(zero8(), max8(x, sub8(zero8(), x)))), s = div8(e, add8(set8(2.0F), e)), square = mul8(s, s);
    F8 sum = set8(1.0F / 17.0F);
    for (int odd = 15; odd > 0; odd -= 2) {
        sum = fma8(sum, square, set8(1.0F / static_cast<float>(odd)));
    }
    return fma8(add8(s, s), sum, max8(x, zero8()));
}

// Calls body(load, store) for eight numbers at a time, or for those that are left at the end.
template <typename Body>
inline void by_eights(std::int64_t count, const Body& body) {
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        body([i](const float* p) { return load8(p + i); }, [i](float* p, F8 x) { store8(p + i, x); });
    }
    if (i < count) {
        body([i, count](const float* p) { return load8_some(p + i, count - i); },
             [i, count](float* p, F8 x) {
                 float some[8];
                 store8(some, x);
                 std::memcpy(p + i, some, static_cast<std::size_t>(count - i) * 4);
             });
    }
}

void activate(Activation kind, const float* x, std::int64_t count, float* out) {
    by_eights(count, [&](auto load, auto store) { store(out, activate8(kind, load(x))); });
}

void sigmoid_mul(const float* gate, const float* x, std::int64_t count, float* out) {
    by_eights(count, [&](auto load, auto store) { store(out, mul8(sigmoid8(load(gate)), load(x))); });
}

void fade(const float* x, const float* bias, const float* rates, float low, float high, std::int64_t count,
          float* steps, float* decays) {
    by_eights(count, [&](auto load, auto store) {
        const F8 step = max8(set8(low), min8(set8(high), softplus8(add8(load(x), load(bias)))));
        store(steps, step);
        if (rates != nullptr) {
            store(decays, exp8(mul8(load(rates), step)));
        }
    });
}

void convolve(const float* const* seen, const float* taps, std::int64_t apart, std::int64_t width, const float* bias,
              bool silu, std::int64_t count, float* out) {
    by_eights(count, [&](auto load, auto store) {
        F8 sum = mul8(load(seen[0]), load(taps));
        for (std::int64_t j = 1; j < width; ++j) {
            sum = fma8(load(seen[j]), load(taps + j * apart), sum);
        }
        sum = bias == nullptr ? sum : add8(sum, load(bias));
        store(out, silu ? silu8(sum) : sum);
    });
}

inline F8 clamped_swiglu8(F8 gate, F8 up, float alpha, float limit) {
    const F8 g = min8(set8(limit), gate), u = max8(set8(-limit), min8(set8(limit), up));
    const F8 open = div8(g, add8(set8(1.0F), exp8(mul8(set8(-alpha), g))));
    return mul8(add8(u, set8(1.0F)), open);
}

void clamped_swiglu(const float* gate, const float* up, float alpha, float limit, std::int64_t count, float* out) {
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        store8(out + i, clamped_swiglu8(load8(gate + i), load8(up + i), alpha, limit));
    }
    if (i < count) {
        float rest[8];
        store8(rest, clamped_swiglu8(load8_some(gate + i, count - i), load8_some(up + i, count - i), alpha, limit));
        std::memcpy(out + i, rest, static_cast<std::size_t>(count - i) * 4);
    }
}

void rotate(const float* head, const float* cos, const float* sin, std::int64_t pairs, float* out) {
    std::int64_t i = 0;
    for (; i + 8 <= pairs; i += 8) {
        const F8 a = load8(head + i), b = load8(head + pairs + i), c = load8(cos + i), s = load8(sin + i);
        store8(out + i, sub8(mul8(a, c), mul8(b, s)));
        store8(out + pairs + i, add8(mul8(b, c), mul8(a, s)));
    }
    for (; i < pairs; ++i) {
        const float a = head[i], b = head[pairs + i];
        out[i] = a * cos[i] - b * sin[i];
        out[pairs + i] = b * cos[i] + a * sin[i];
    }
}

std::int64_t argmax(const float* x, std::int64_t count) {
    F8 tops = set8(-kInfinity), sums = zero8();
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const F8 some = load8(x + i);
        tops = max8(tops, some);
        sums = add8(sums, mul8(some, zero8()));  // NaN exactly where an element is NaN or infinite
    }
    float top = top8(tops);
    const float all = sum8(sums);
    bool odd = all != all;
    for (; i < count; ++i) {
        odd = odd || x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    for (std::int64_t j = 0; odd && j < count; ++j) {
        if (x[j] != x[j]) {
            return j;
        }
    }
    std::int64_t j = 0;
    for (const F8 same = set8(top); j + 8 <= count && same8(load8(x + j), same) == 0;) {
        j += 8;
    }
    while (j + 1 < count && !(x[j] >= top)) {
        ++j;
    }
    return j;
}
