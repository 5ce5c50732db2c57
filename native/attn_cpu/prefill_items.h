// The work of prompts at one layer, cut into items. The cut decides which thread computes an item, never a result.
#pragma once
#include <atomic>
#include <vector>

#include "kernel_api.h"
#include "latch.h"
#include "matrix.h"

namespace hpcdecode {

// Tokens [start, start + count) of one prompt.
// packed: Memory of the prompt's K and V, with those of the tokens before.
// skipped: How many of the first tokens need no result.
struct PromptChunk {
    uint8_t* packed;
    int64_t bytes;
    int64_t start, count, skipped;
};

// Rows of q, k, v and out are the chunks' tokens in order.
struct PromptRows {
    std::vector<PromptChunk> chunks;
    Matrix q, k, v, out;
    const float* sinks;
    int64_t sink_count;
};

struct PromptLayer {
    LayerShape shape;
    PromptLayout layout;
    int tokens_per_item;
    size_t scratch;  // bytes of one thread
};

// Items that pack K and V come first, then those that attend, the longest first. Items of about the same length stay
// head by head, so that keys stay in the cache.
class PromptItems {
  public:
    struct Item {
        int32_t chunk, head;
        int64_t token, count;  // of the chunk
        double products;       // multiplications, estimated; 0: packs
    };

    // threads: For which the work is cut.
    // seconds: Of a product, estimated.
    PromptItems(const PromptLayer& layer, const PromptKernel& kernel, const PromptRows& rows, int threads,
                double seconds);

    // Returns the estimated seconds of the next item: infinity for one that packs, 0 while the last of those are under
    // way elsewhere, -1 if there is none.
    double next_seconds() const;
    int64_t take();  // -1: none left
    bool ready(int64_t i) const { return packs(i) || packed_.open(); }
    void wait_until_packed() { packed_.wait(); }
    void run(int64_t i, uint8_t* scratch);
    void note_packed() { packed_.count_down(); }  // of an item that packs

    bool packs(int64_t i) const { return i < packs_; }
    const Item& item(int64_t i) const { return items_[i]; }
    int64_t group(const Item& item) const { return int64_t{item.chunk} * layer_.shape.kv_heads + item.head; }
    double seconds(const Item& item) const { return item.products * seconds_ + kItemSeconds; }
    double products() const { return products_; }

  private:
    static constexpr double kItemSeconds = 1e-6;

    double products_of(int64_t tokens, int64_t keys) const;
    int64_t tokens_per_item(const PromptChunk& chunk, double want) const;
    void cut_packs(int32_t chunk);
    void cut_attention(int32_t chunk, double want);
    void pack(const Item& item) const;
    void attend(const Item& item, uint8_t* scratch) const;

    const PromptLayer& layer_;
    const PromptKernel& kernel_;
    const PromptRows& rows_;
    double seconds_;
    std::vector<int64_t> first_rows_;  // of the chunks
    std::vector<Item> items_;
    int64_t packs_ = 0;
    double products_ = 0;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) Latch packed_;
};

}  // namespace hpcdecode
