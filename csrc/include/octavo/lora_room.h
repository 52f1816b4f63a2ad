// Memory that all ranks of a host map, in which the front puts adapters: a step names each by its number and place.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "octavo/llama.h"

namespace octavo {

class LoraRoom {
  public:
    explicit LoraRoom(const TensorRef& memory);  // u8 [bytes]

    // Of what is written for an adapter of so many layers beside its matrices.
    static std::int64_t table_bytes(std::int64_t layers);

    // In the front: an adapter whose matrices lie in the memory gets a number, and its table is written to `place`.
    void put(Lora& lora, std::int64_t place);
    // In the front: these bytes are of no adapter any more. Their memory goes back to the system.
    void drop(const Span& bytes);
    // In the front: where those lie that were put since the last call.
    std::vector<Span> take_new();
    const TensorRef& memory() const { return memory_; }

    // Some rows of each stack: of an adapter they come one after the other, as in a rank's columns of `qkv` and
    // `gate_up`, or stay where they are, as in columns of all ranks.
    struct OwnRows {
        std::vector<Span> qkv, gate_up;
        Span hidden;
    };
    // In each rank: what those rows get of an adapter. It stays until the next call of `forget`. `check` throws for one
    // that is none of the model. ArgumentError for what no front has put there.
    const Lora& find(std::int64_t number, std::int64_t place, const OwnRows& own,
                     const std::function<void(const Lora&)>& check);
    // Between steps: of adapters that were found, those of long ago.
    void forget();

  private:
    struct Table;

    Lora read(std::int64_t number, std::int64_t place) const;

    char* at(std::int64_t place) const { return memory_.as<char>() + place; }
    std::int64_t bytes() const { return memory_.shape[0]; }

    TensorRef memory_;
    std::int64_t last_ = 0;
    std::mutex mutex_;
    std::vector<Span> new_;
    std::map<std::int64_t, Lora> found_;  // by number
};

}  // namespace octavo
