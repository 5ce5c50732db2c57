// Attention as a stage of a chain. A chain of native/ops_cpu calls it; native/attn_cpu, which holds the KV cache,
// implements it.
#pragma once
#include <cstdint>
#include <vector>

namespace hpcdecode {

// The sequences first, first + step, ... of a decode step, `count` of them, and their rows.
// qkv, out: Rows of the first of them, or of the step (see RowAttention); qkv_bytes and out_bytes lead from one row to
// the next.
struct SequenceRows {
    int64_t first, step, count;
    const uint8_t* qkv;
    int64_t qkv_bytes;
    uint8_t* out;
    int64_t out_bytes;

    SequenceRows part(int64_t begin, int64_t end) const {
        return {first + begin * step,    step,     end - begin, qkv + begin * qkv_bytes, qkv_bytes,
                out + begin * out_bytes, out_bytes};
    }
};

// A range of memory that will be read.
struct Lines {
    const char *begin = nullptr, *end = nullptr;
};

// Attention of the new tokens of every sequence of a decode step, some sequences at a time, on the calling thread.
// Usually each has one, and a row of it. If any has more, `rows` are those of the whole step, one row behind the other,
// and name sequences alone.
class RowAttention {
  public:
    virtual ~RowAttention() = default;
    // Returns the sequences of a step of so many tokens: fewer if some have several.
    virtual int64_t sequences(int64_t tokens) const { return tokens; }
    // Begins a step. Throws std::invalid_argument; else calls of `attend` follow, then `end`.
    virtual void begin(int64_t tokens, int threads) = 0;
    virtual void attend(int layer, int thread, const SequenceRows& rows) = 0;
    // Returns how many of the first of `rows` should be attended to at once beside other work.
    // Appends the memory of their keys and values to `lines`, to be prefetched.
    virtual int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const = 0;
    virtual void end() = 0;
};

}  // namespace hpcdecode
