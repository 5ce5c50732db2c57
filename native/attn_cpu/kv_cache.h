// The KV cache of an R-rank on CPUs: its memory, and the threads and kernels that attend to it.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "block_pool.h"
#include "choice.h"
#include "matrix.h"
#include "numa.h"
#include "page_contents.h"
#include "plan.h"
#include "thread_clock.h"
#include "workers.h"

namespace hpcdecode {

struct KvCacheOptions {
    KvType kv_type;
    int64_t capacity_tokens;
    int max_sequences, block_tokens, threads;
    std::vector<int> cpus;
    std::string isa;         // empty: the best one
    std::vector<int> nodes;  // NUMA node of each of `cpus`; empty: unknown
    bool team = false;       // run on torch's threads
    FrameOptions frames{};
    bool windowed = false;  // drop what leaves windows
    int lookahead = 0;      // positions by which sequences may be truncated then
};

// A paged KV cache. hpcdecode/_attn_cpu.pyi describes the methods.
//
// Calls exclude each other. Bad arguments throw std::invalid_argument before anything changes.
class KvCache {
  public:
    KvCache(const std::vector<LayerShape>& layers, const KvCacheOptions& options);

    void extend(const int32_t* slots, const int32_t* counts, int n);
    void append(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& kv);
    void attend(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& qkv, const Matrix& out,
                const float* sinks, int64_t sink_count);
    void release(const int32_t* slots, int n);
    void fork(int src, int dst);
    void truncate(int slot, int64_t length);
    int64_t length(int slot);
    int64_t held_blocks(int slot);  // their number
    uint32_t copy_out(int slot, int64_t first, uint8_t* to, size_t size);
    void copy_in(int slot, int64_t first, const uint8_t* from, size_t size);
    void check();
    double read_seconds();

    // Of KV caches with frames; see placed_pages.h.
    void place_pages(const int32_t* frames, int n);
    int ranges() const { return pool_.nodes(); }
    size_t frame_bytes() const { return pool_.frame_bytes(); }
    void copy_block(int32_t from, int32_t to);
    std::vector<BlockTable::Copy> take_copies();
    // Marks the ranges in which slots have blocks, all or those of their last counts[i] positions: [n, ranges].
    void mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks, int64_t size);
    std::vector<int32_t> written_blocks(const int32_t* slots, const int32_t* counts, int n);
    void mark_used(uint8_t* marks, int64_t size);  // [blocks]: whether a slot holds it
    size_t row_bytes(int layer) const;             // of a token, all heads
    // Copy tokens of blocks in a frame to rows of that size, or back. Items are [n] blocks of the page, first tokens
    // and numbers of tokens. Other calls may run meanwhile that leave this frame alone.
    void save_tokens(int layer, int frame, const int32_t* items, int n, uint8_t* rows, int64_t size) const;
    void restore_tokens(int layer, int frame, const int32_t* items, int n, uint8_t* rows, int64_t size);
    // Takes the checksums of what a move writes, and copies its tokens to the journal of its page.
    void seal(PageMove& move, uint8_t* journal, int64_t size) const;
    // Copies the tokens of a page's journal to the frame. Returns false if something that a move has read is not what
    // was written.
    bool unseal(const PageMove& move, uint8_t* journal, int64_t size);

    const BlockPool& pool() const { return pool_; }
    const char* isa() const { return table_.name; }
    int threads() const { return workers_->threads(); }
    const std::shared_ptr<Workers>& workers() const { return workers_; }  // for other work on the same cores
    const NumaNodes& nodes() const { return nodes_; }
    int64_t bytes_read() const { return bytes_read_; }
    double attend_seconds() const { return attend_seconds_; }
    double thread_seconds() const { return clock_.thread_seconds(); }  // of append and attend, of all threads
    double busy_seconds() const { return clock_.busy_seconds(); }      // of these, in which threads had work

  private:
    friend class KvItems;
    friend class StepAttention;
    struct Call;
    struct AlignedFree {
        void operator()(void* p) const { std::free(p); }
    };
    using Buffer = std::unique_ptr<uint8_t, AlignedFree>;

    using MoveTokens = void (*)(const TokenArgs&);
    std::vector<uint32_t> sums_of(const PageMove& move) const;
    void move_tokens(MoveTokens move, int layer, int frame, const int32_t* items, int n, uint8_t* rows,
                     int64_t size) const;
    AppendArgs new_rows(const Call& call, const SequencePlan& s, int head, int64_t begin, int64_t end) const;
    void write_rows(const Call& call, const SequencePlan& s, int head);
    void run_item(const Call& call, int64_t item, int thread);
    void merge(const Call& call, const SequencePlan& s, int head, int heads, int thread);
    void reserve_items(const LayerLayout& layer);
    void choose_all(const Call& call, const int32_t* slots, const int32_t* counts, int n);
    void score(const Call& call, const Query& query, int64_t begin, int64_t end, float* scores, int thread);
    void write_entries(const Call& call, const SequencePlan& s);
    void write_index_keys(const Call& call, const SequencePlan& s, int64_t each);
    void choose_for(const Call& call, const Query& query, int list, const float* scores, int thread);
    void list_rows(const LayerLayout& layer, const Query& query);
    void begin_choices(const LayerLayout& layer, const int32_t* slots, const int32_t* counts, int n);
    void choose_here(const Call& call, const std::vector<Query>& queries, int thread, std::vector<float>& scores);
    void choose_together(const Call& call, const std::vector<Query>& queries);
    void run_parallel(Call& call, const std::vector<int64_t>& bounds, void (*work)(Call&, int64_t, int));
    void write_all(Call& call);
    void make_plan(int layer, const int32_t* slots, const int32_t* counts, int n);
    void populate(const std::vector<size_t>& pages);
    void reserve_scratch(const LayerLayout& layer, int64_t rows);
    static void grow(Buffer& buffer, size_t& size, size_t need);

    const KernelTable& table_;
    std::shared_ptr<Workers> workers_;
    NumaNodes nodes_;
    NodeQueues queues_;
    BlockPool pool_;
    std::mutex mutex_;
    AttendPlan plan_;
    std::vector<Choice> choices_;                // by slot
    std::vector<float> scores_;                  // of indexers
    std::vector<std::vector<float>> of_tokens_;  // one per thread: scores, of which blocks have the largest
    std::vector<std::vector<uint32_t>> rooms_;   // one per thread, for `choose`
    std::vector<Buffer> scratch_;                // one per thread
    std::vector<size_t> scratch_size_;
    Buffer partials_;
    size_t partials_size_ = 0;
    std::unique_ptr<std::atomic<int>[]> pending_;
    int64_t pending_size_ = 0;
    int64_t bytes_read_ = 0;
    double attend_seconds_ = 0;
    double seconds_per_byte_ = 1e-10;  // of a thread that attends; a mean over the regions so far
    ThreadClock clock_;
};

}  // namespace hpcdecode
