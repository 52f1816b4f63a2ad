// What low-rank adapters add to rows of products: of a tile of 16 rows a register holds all or half, and each sum has
// the order of k.

constexpr std::int64_t low_rank_bytes(const Weight& b) { return b.format == Format::kF32 ? 4 : 2; }

// The tile with row i of b.
inline const std::uint8_t* low_rank_tile(const Weight& b, std::int64_t i) {
    return static_cast<const std::uint8_t*>(b.data) + i / kGroupRows * kGroupRows * b.rows * low_rank_bytes(b);
}

// Sums of R::kRows rows of a tile, from `place` on.
template <Format kFormat, typename R>
inline typename R::F low_rank_sums(const std::uint8_t* tile, std::int64_t place, std::int64_t rank, const float* low) {
    auto sums = R::zero();
    std::int64_t k = 0;
    const auto add_pair = [&](std::int64_t at) __attribute__((always_inline)) {
        const auto pair = R::pair(tile + 2 * at * kGroupRows + 4 * place);
        sums = R::fma(R::first(pair), R::set(low[at]), sums);
        sums = R::fma(R::second(pair), R::set(low[at + 1]), sums);
    };
    for (; kFormat == Format::kBF16 && k + 8 <= rank; k += 8) {
        add_pair(k);
        add_pair(k + 2);
        add_pair(k + 4);
        add_pair(k + 6);
    }
    for (; kFormat == Format::kBF16 && k + 2 <= rank; k += 2) {
        add_pair(k);
    }
    for (; k < rank; ++k) {
        if (kFormat == Format::kF32) {
            const auto* numbers = reinterpret_cast<const float*>(tile) + k * kGroupRows + place;
            sums = R::fma(R::load(numbers), R::set(low[k]), sums);
        } else {
            const std::uint8_t* numbers = tile + 2 * (k * kGroupRows + place);
            const auto wide = kFormat == Format::kF16 ? R::halves(numbers) : R::top_halves(numbers);
            sums = R::fma(wide, R::set(low[k]), sums);
        }
    }
    return sums;
}

template <Format kFormat>
inline void add_low_rank_rows(const LoraPart& part, std::int64_t first, std::int64_t count, const float* low,
                              float* y) {
    for (std::int64_t i = 0; i < count;) {
        const std::int64_t row = part.skipped + first + i, place = row % kGroupRows, left = count - i;
        const std::uint8_t* tile = low_rank_tile(part.b, row);
        if (place % Rows::kRows == 0 && left >= Rows::kRows) {
            const auto sums = low_rank_sums<kFormat, Rows>(tile, place, part.b.rows, low);
            Rows::store(y + i, Rows::add(Rows::load(y + i), sums));
            i += Rows::kRows;
            continue;
        }
        float wide[8];
        const std::int64_t skipped = place % 8, some = 8 - skipped < left ? 8 - skipped : left;
        store8(wide, low_rank_sums<kFormat, Rows8>(tile, place - skipped, part.b.rows, low));
        for (std::int64_t j = 0; j < some; ++j) {
            y[i + j] += wide[skipped + j];
        }
        i += some;
    }
}

void add_low_rank(const LoraPart& part, std::int64_t first, std::int64_t count, const float* low, float* y) {
    switch (part.b.format) {
        case Format::kF16:
            return add_low_rank_rows<Format::kF16>(part, first, count, low, y);
        case Format::kBF16:
            return add_low_rank_rows<Format::kBF16>(part, first, count, low, y);
        default:
            return add_low_rank_rows<Format::kF32>(part, first, count, low, y);
    }
}

bool adds_low_rank(const Weight& weight) {
    return weight.format >= Format::kQ8 && has_digits(weight.rounding) && !has_row_scales(weight.format);
}

// What is added to a tile of rows of some columns: asked for while their products keep the core busy, and added to
// these.
template <std::int64_t kMost>
class LowRankTile {
  public:
    // `most` rows, asked for in so many steps.
    LowRankTile(const LinearJob& job, std::int64_t column, std::int64_t columns, std::int64_t row, std::int64_t most,
                std::int64_t steps) {
        if (job.low_rank != nullptr) {
            find(job, column, columns, row, most, steps);
        }
    }
    __attribute__((always_inline)) void fetch_some() {
        for (std::int64_t i = 0; i < each_ && at_ < bytes_; ++i) {
            kMost > 8 ? fetch_second(asked_[next_] + at_) : fetch(asked_[next_] + at_);
            if (++next_ == num_asked_) {
                next_ = 0;
                at_ += 64;
            }
        }
    }
    void add(const LinearJob& job, std::int64_t column, std::int64_t columns, std::int64_t row, std::int64_t most) {
        if (job.low_rank != nullptr) {
            add_all(job, column, columns, row, most);
        }
    }

  private:
    // The one part that has all rows of the tile in bfloat16, beside each other.
    struct Whole {
        const std::uint8_t* tile;
        std::int64_t place, rank;
        const float* low;
    };

    __attribute__((noinline)) void find(const LinearJob& job, std::int64_t column, std::int64_t columns,
                                        std::int64_t row, std::int64_t most, std::int64_t steps) {
        const bool all = row + most <= job.weight.rows;
        for (std::int64_t c = 0; c < columns; ++c) {
            const LowRank& adapter = job.low_rank[column + c];
            whole_[c].tile = nullptr;
            for (std::int64_t p = 0; p < adapter.count; ++p) {
                const LoraPart& part = adapter.parts[p];
                const std::int64_t start = job.low_row + row - part.first, at = start + part.skipped;
                if (start + most <= 0 || start >= part.b.cols) {
                    continue;
                }
                const std::uint8_t* tile = low_rank_tile(part.b, at > 0 ? at : 0);
                if (num_asked_ == 0 || (tile != asked_[num_asked_ - 1] && num_asked_ < kMost)) {
                    asked_[num_asked_++] = tile;
                    const std::int64_t bytes = kGroupRows * part.b.rows * low_rank_bytes(part.b);
                    bytes_ = bytes > bytes_ ? bytes : bytes_;
                }
                const bool whole = all && start >= 0 && start + most <= part.b.cols && at % most == 0;
                if (whole && part.b.format == Format::kBF16) {
                    whole_[c] = {tile, at % kGroupRows, part.b.rows, adapter.low + part.low};
                }
            }
        }
        each_ = 2 * ((bytes_ + 63) / 64 * num_asked_ + steps - 1) / steps;
    }

    __attribute__((noinline)) void add_all(const LinearJob& job, std::int64_t column, std::int64_t columns,
                                           std::int64_t row, std::int64_t most) const {
        float* y = job.y + column * job.y_stride + row;
        for (std::int64_t c = 0; c < columns; ++c, y += job.y_stride) {
            const Whole& whole = whole_[c];
            if (whole.tile == nullptr) {
                add_parts(job, job.low_rank[column + c], row, most, y);
                continue;
            }
            for (std::int64_t r = 0; r < most; r += Rows::kRows) {
                const auto sums =
                    low_rank_sums<Format::kBF16, Rows>(whole.tile, whole.place + r, whole.rank, whole.low);
                Rows::store(y + r, Rows::add(Rows::load(y + r), sums));
            }
        }
    }

    static void add_parts(const LinearJob& job, const LowRank& adapter, std::int64_t row, std::int64_t most, float* y) {
        const std::int64_t left = job.weight.rows - row, rows = left < most ? left : most;
        for (std::int64_t p = 0; p < adapter.count; ++p) {
            const LoraPart& part = adapter.parts[p];
            const std::int64_t start = job.low_row + row - part.first, end = start + rows;
            const std::int64_t from = start > 0 ? start : 0, to = end < part.b.cols ? end : part.b.cols;
            if (from < to) {
                add_low_rank(part, from, to - from, adapter.low + part.low, y + from - start);
            }
        }
    }

    Whole whole_[kMost];
    const std::uint8_t* asked_[kMost];
    std::int64_t num_asked_ = 0, next_ = 0, at_ = 0, bytes_ = 0, each_ = 0;
};
