// Attention as a stage of other work: what a chain of native/ops_cpu calls, in the module that holds the KV cache.
#pragma once
#include <cstdint>

namespace hpcdecode {

// Sequences first, first + step, ... of a step, `count` of them, and their rows: qkv and out of the first, and the
// bytes from one to the next.
struct SequenceRows {
    int64_t first, step, count;
    const uint8_t* qkv;
    int64_t qkv_bytes;
    uint8_t* out;
    int64_t out_bytes;
};

// One new token of every sequence of a step, some sequences at a time, on the calling thread.
class RowAttention {
  public:
    virtual ~RowAttention() = default;
    // Of a step of that many sequences, by that many threads: throws std::invalid_argument, or calls of `attend`
    // follow, then `end`.
    virtual void begin(int64_t sequences, int threads) = 0;
    virtual void attend(int layer, int thread, const SequenceRows& rows) = 0;
    virtual void end() = 0;
};

}  // namespace hpcdecode
