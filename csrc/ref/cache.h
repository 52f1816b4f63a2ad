// A layer's cache read and written as numbers, whatever its layout and type.
#pragma once

#include <vector>

#include "octavo/api.h"

namespace octavo::ref {

using Row = std::vector<double>;

enum class Kind { kKeys, kValues };

class Cache {
  public:
    Cache(const KvCache& kv, std::int64_t head_dim);

    Row get(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot) const;
    void put(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot, const Row& row) const;

    std::int64_t heads, block_size, head_dim;

  private:
    char* element(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot, std::int64_t d) const;
    char* slot_scale(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot) const;
    double static_scale(Kind kind, std::int64_t head) const;

    KvCache kv_;
    DType dtype_;
    bool joint_, packed_, paged_;
};

}  // namespace octavo::ref
