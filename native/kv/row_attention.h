// Attention as a stage of other work: what a chain of native/ops_cpu calls, in the module that holds the KV cache.
#pragma once
#include <cstdint>
#include <vector>

namespace hpcdecode {

// Sequences first, first + step, ... of a step, `count` of them, and their rows: qkv and out of the first, and the
// bytes from one to the next.
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

// Memory that will be read.
struct Lines {
    const char *begin = nullptr, *end = nullptr;
};

// One new token of every sequence of a step, some sequences at a time, on the calling thread.
class RowAttention {
  public:
    virtual ~RowAttention() = default;
    // Of a step of that many sequences, by that many threads: throws std::invalid_argument, or calls of `attend`
    // follow, then `end`.
    virtual void begin(int64_t sequences, int threads) = 0;
    virtual void attend(int layer, int thread, const SequenceRows& rows) = 0;
    // How many of the first of `rows` are to be attended to at once beside other work; appends what of their keys and
    // values should be fetched before.
    virtual int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const = 0;
    virtual void end() = 0;
};

}  // namespace hpcdecode
