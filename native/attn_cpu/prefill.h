// The prompt attention of an S-rank on CPUs, over K and V of the prompts, which the caller holds packed.
#pragma once
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kv_cache.h"
#include "layout.h"
#include "thread_clock.h"
#include "workers.h"

namespace hpcdecode {

// Tokens [start, start + count) of one prompt.
// packed: Memory of the prompt's K and V, with those of the tokens before.
// skipped: How many of the first tokens need no result.
struct PromptChunk {
    uint8_t* packed;
    int64_t bytes;
    int64_t start, count, skipped;
};

// Calls exclude each other. Bad arguments throw std::invalid_argument before anything is written.
class Prefill {
  public:
    // type: Data type of the activations. K and V are packed in it if the instruction set multiplies it, else in float.
    Prefill(const std::vector<LayerShape>& layers, ActType type, std::shared_ptr<Workers> workers,
            const std::string& isa);

    int64_t packed_bytes(int layer, int64_t tokens) const;  // of one prompt's K and V

    // Packs k and v of the chunks, then attends causally from the chunks' tokens. Rows of q, k, v and out are the
    // chunks' tokens in order. Rows of out stay as they are for skipped tokens.
    void attend(int layer, const std::vector<PromptChunk>& chunks, const Matrix& q, const Matrix& k, const Matrix& v,
                const Matrix& out, const float* sinks, int64_t sink_count);

    const char* isa() const { return table_.name; }
    int threads() const { return workers_->threads(); }
    double thread_seconds() const { return clock_.thread_seconds(); }  // of attend, of all threads
    double busy_seconds() const { return clock_.busy_seconds(); }      // of these, in which threads had work

  private:
    struct Layer {
        LayerShape shape;
        PromptLayout layout;
        int tokens_per_item;
        size_t scratch;  // bytes of one thread
    };
    struct Call;
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };

    const Layer& layer_at(int layer) const;
    void check(const Layer& l, const std::vector<PromptChunk>& chunks, const Matrix& q, const Matrix& k,
               const Matrix& v, const Matrix& out, const float* sinks, int64_t sink_count) const;
    void pack(const Call& call, int64_t item) const;
    void attend_item(const Call& call, int64_t item, int thread) const;

    const KernelTable& table_;
    const PromptKernel& kernel_;
    ActType type_;
    std::vector<Layer> layers_;
    std::shared_ptr<Workers> workers_;
    std::vector<std::unique_ptr<uint8_t, Free>> scratch_;  // one per thread
    std::mutex mutex_;
    mutable ThreadClock clock_;
};

}  // namespace hpcdecode
