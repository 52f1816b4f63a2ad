// Writes one slot's keys or values into pages of any form.

inline float static_scale(const KvSide& side, std::int64_t head) {
    return side.scales ? side.scales[head * side.per_head] : 1.0F;
}

inline char* slot_scale(const KvSide& side, std::int64_t block, std::int64_t head, std::int64_t slot) {
    return side.slot_scales + block * side.slot_scale_block + head * side.slot_scale_head + 2 * slot;
}

inline std::int64_t size_in_cache(DType dtype) {
    return dtype == DType::kF32 ? 4 : dtype == DType::kF16 || dtype == DType::kBF16 ? 2 : 1;
}

inline char* slot_place(const KvPages& pages, const KvSide& side, std::int64_t block, std::int64_t head,
                        std::int64_t slot) {
    return side.data + (block * side.block + head * side.head + slot * side.slot) * size_in_cache(pages.dtype);
}

// The scale with which the largest of a row becomes 127, as far as float16 goes; NaN where a number is not finite.
inline std::uint16_t scale_of_row(const float* row, std::int64_t count) {
    float top = 0;
    bool broken = false;
    for (std::int64_t i = 0; i < count; ++i) {
        const float size = fabsf(row[i]);
        broken = broken || !(size < kInfinity);
        top = size > top ? size : top;
    }
    const float scale = top / 127.0F;
    return broken ? std::uint16_t{0x7e00} : float_to_half(scale < kLargestHalf ? scale : kLargestHalf);
}

void write_slot(const KvPages& pages, const KvSide& side, std::int64_t block, std::int64_t head, std::int64_t slot,
                const float* row) {
    char* to = slot_place(pages, side, block, head, slot);
    const std::int64_t step = side.outer * size_in_cache(pages.dtype);
    float divisor = static_scale(side, head);
    if (side.slot_scales) {
        const std::uint16_t half = scale_of_row(row, pages.head_dim);
        std::memcpy(slot_scale(side, block, head, slot), &half, 2);
        const float scale = half_to_float(half);
        divisor = scale > 0 ? scale : kInfinity;
    }
    constexpr std::int64_t kPiece = 64;
    float scaled[kPiece];
    for (std::int64_t i = 0; i < pages.head_dim; i += side.run, to += step) {
        if (divisor == 1.0F) {
            from_float(pages.dtype, row + i, side.run, to);
            continue;
        }
        for (std::int64_t j = 0; j < side.run; j += kPiece) {
            const std::int64_t some = side.run - j < kPiece ? side.run - j : kPiece;
            for (std::int64_t k = 0; k < some; ++k) {
                scaled[k] = row[i + j + k] / divisor;
            }
            from_float(pages.dtype, scaled, some, to + j * size_in_cache(pages.dtype));
        }
    }
}
