// Which logits of some rows the front of a group asks other hosts for: all, or those that its branches look at.
//
// A branch that draws among its k likeliest tokens, or takes the likeliest, looks at no others (sample.h), but for
// those that its adjustments name. So a host sends the k likeliest of its tokens that are not named, and what the model
// says of those that are. The front has -inf in the place of all others, and samples as one process does, to the bit. A
// host's row that has NaN or +inf says so by its first entry.
#pragma once

#include <cstdint>
#include <vector>

#include "octavo/host_links.h"
#include "octavo/tensor.h"

namespace octavo {

class WantedLogits {
  public:
    WantedLogits() = default;  // all logits of any number of rows
    // counts i32 [r]: how many of a row's likeliest; 0: all logits. Row i names the ids [ends[i], ends[i + 1]) of ends
    // i64 [r + 1], ids i64 [m]. mask_of, masks: as Draws have them, by row; the likeliest are those of the mask.
    WantedLogits(const TensorRef& counts, const TensorRef& ends, const TensorRef& ids, const TensorRef& mask_of,
                 const TensorRef& masks);

    // Some of the rows.
    WantedLogits rows(std::int64_t first, std::int64_t count) const;
    bool fit(const Columns& logits) const;

    // As bytes for other hosts, and from those. False: they are no rows.
    std::vector<char> to_bytes() const;
    bool take_bytes(const std::vector<char>& bytes);

    // What a host sends of its columns: how many bytes, and the bytes. Its logits are changed by that.
    std::int64_t bytes_of(const Columns& logits, int host) const;
    void pack(const Columns& logits, int host, char* to) const;
    // In the front, before and when it comes. False: it is not what was asked for.
    void clear(const Columns& logits, int host) const;
    bool unpack(const Columns& logits, int host, const char* from) const;

  private:
    struct Row {
        std::int32_t count = 0;
        std::vector<std::int32_t> named;
        std::vector<std::uint32_t> mask;  // a bit per token; none: all may be drawn
    };

    bool is_whole(std::int64_t row) const { return rows_.empty() || at(row).count == 0; }
    const Row& at(std::int64_t row) const { return rows_[static_cast<std::size_t>(row)]; }
    std::int64_t entries(std::int64_t row, const Span& span) const;
    std::vector<std::int64_t> places(const Columns& logits, const Span& span) const;
    template <typename Body>
    void each_row(const Columns& logits, const Span& span, const Body& body) const;
    void pack_row(std::int64_t row, float* x, const Span& span, char* to) const;
    bool unpack_row(std::int64_t row, float* x, const Span& span, const char* from) const;

    std::vector<Row> rows_;
};

}  // namespace octavo
