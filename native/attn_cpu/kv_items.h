// The work of a KV cache at one layer beside other work, cut into items.
#pragma once
#include <atomic>
#include <mutex>
#include <vector>

#include "call.h"

namespace hpcdecode {

// What a layer brings to a KV cache: K and V of prompts, to append, and rows to append and attend from.
// A slot is in one of the lists. The arguments are those of KvCache::append and KvCache::attend.
struct LayerRows {
    int layer;
    const int32_t *prompt_slots, *prompt_counts;
    int prompts;
    Matrix kv;
    const int32_t *slots, *counts;
    int n;
    Matrix qkv, out;
    const float* sinks;
    int64_t sink_count;
};

constexpr double kRowItemSeconds = 1e-6;  // of an item that attends, beside its bytes
constexpr int64_t kAppendTokens = 256;    // of an item that appends; whole runs of a block, and whole tiles

// Items that attend, of every NUMA node, the longest first; then those that append. The KV cache is locked as long as
// this lives.
class KvItems {
  public:
    // Throws std::invalid_argument before anything is written.
    KvItems(KvCache& cache, const LayerRows& rows);

    int node(int thread) const { return cache_.nodes_.of_thread(thread); }
    double next_seconds(int node) const;  // estimated, of the next item that attends; -1: none left
    int64_t take(int node) { return cache_.queues_.take(node); }  // -1: none left
    void run(int64_t i, int thread) { cache_.run_item(call_, i, thread); }
    double seconds(int64_t i) const;  // estimated

    int64_t take_append(int node) { return append_queues_.take(node); }
    void run_append(int64_t i) const;
    int64_t append_group(int64_t i) const;  // the same for items of one sequence and head

    int64_t bytes() const { return bytes_; }
    // Counts what the items have read.
    // seconds: Of the region, for items that attend; busy_seconds: of all threads together.
    void finish(double seconds, double busy_seconds);

  private:
    struct Append {
        int32_t sequence, head;
        int64_t begin, end;
    };
    void check(const LayerRows& rows);
    void cut_appends();

    KvCache& cache_;
    LayerRows rows_;
    const std::unique_lock<std::mutex> lock_;
    KvCache::Call call_, append_call_;
    std::vector<SequencePlan> appended_;
    std::vector<Append> appends_;
    NodeQueues append_queues_;
    int64_t bytes_ = 0;
};

}  // namespace hpcdecode
