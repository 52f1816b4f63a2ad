// Memory that grows and never shrinks, 64-byte aligned, not initialized.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace octavo {

template <typename T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    T* take(std::int64_t count) {
        if (count > count_) {
            std::free(data_);
            const auto bytes = (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
            data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
            count_ = data_ ? count : 0;
            if (data_ == nullptr) {
                throw std::bad_alloc();
            }
        }
        return data_;
    }

  private:
    T* data_ = nullptr;
    std::int64_t count_ = 0;
};

}  // namespace octavo
