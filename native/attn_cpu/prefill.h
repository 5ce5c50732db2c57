// The prompt attention of an S-rank on CPUs, over K and V of the prompts, which the caller holds packed.
#pragma once
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kv_cache.h"
#include "layout.h"
#include "region.h"
#include "workers.h"

namespace hpcdecode {

// The seconds of a call, dealt out by what its threads spent: attention and appends of a KV cache, and prompts.
struct RegionSeconds {
    double attend = 0, append = 0, prefill = 0;
};

// Calls exclude each other. Bad arguments throw std::invalid_argument before anything is written.
class Prefill {
  public:
    // type: Data type of the activations. K and V are packed in it if the instruction set multiplies it, else in float.
    Prefill(const std::vector<LayerShape>& layers, ActType type, std::shared_ptr<Workers> workers,
            const std::string& isa);

    int64_t packed_bytes(int layer, int64_t tokens) const;  // of one prompt's K and V

    // Packs k and v of the chunks, then attends causally from the chunks' tokens. Rows of out stay as they are for
    // skipped tokens.
    // cache, beside: A KV cache on the same workers, and its rows of the layer, which are done in the same region.
    RegionSeconds attend(int layer, const PromptRows& rows, KvCache* cache = nullptr,
                         const LayerRows* beside = nullptr);

    bool traces() const { return traces_; }
    void set_traces(bool traces) { traces_ = traces; }
    const std::vector<ItemTime>& item_times() const { return item_times_; }  // of the last call, if it was traced

    const char* isa() const { return table_.name; }
    int threads() const { return workers_->threads(); }
    double thread_seconds() const { return clock_.thread_seconds(); }
    double busy_seconds() const { return clock_.busy_seconds(); }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };

    const PromptLayer& layer_at(int layer) const;
    void check(const PromptLayer& l, const PromptRows& rows) const;
    void learn(double products, double busy_seconds);

    const KernelTable& table_;
    const PromptKernel& kernel_;
    ActType type_;
    std::vector<PromptLayer> layers_;
    std::shared_ptr<Workers> workers_;
    std::vector<std::unique_ptr<uint8_t, Free>> scratch_;  // one per thread
    std::vector<uint8_t*> scratch_of_;
    std::mutex mutex_;
    ThreadClock clock_;
    double seconds_per_product_ = 1e-11;  // of a thread; a mean over the calls so far
    bool traces_ = false;
    std::vector<ItemTime> item_times_;
};

}  // namespace hpcdecode
