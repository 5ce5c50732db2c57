// The recurrent states of an R-rank on CPUs: their memory, and the threads and kernels that take tokens through them.
#pragma once
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "kv_cache.h"
#include "matrix.h"
#include "numa.h"
#include "recur_plan.h"
#include "recurrent_layers.h"
#include "state_slots.h"
#include "workers.h"

namespace hpcdecode {

struct StateStoreOptions {
    StateTypes types;
    int max_sequences, threads;
    std::vector<int> cpus;
    std::string isa;                  // empty: the best one
    std::vector<int> nodes;           // NUMA node of each of `cpus`; empty: unknown
    bool team = false;                // run on torch's threads
    const KvCache* beside = nullptr;  // its threads and nodes are used, if given
    int lookahead = 0;                // tokens by which sequences may be truncated
};

// States of sequences. hpcdecode/_attn_cpu.pyi describes the methods.
//
// Calls exclude each other. Bad arguments throw std::invalid_argument before anything changes.
class StateStore {
  public:
    StateStore(const std::vector<RecurrentShape>& layers, std::vector<RecurrentWeights> weights,
               const StateStoreOptions& options);

    void extend(const int32_t* slots, const int32_t* counts, int n);
    void run(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& rows, const Matrix& out);
    void release(const int32_t* slots, int n);
    void fork(int src, int dst);
    void truncate(int slot, int64_t length);
    int64_t length(int slot);
    int open_slots();
    void check();
    double rewrite_seconds();

    const char* isa() const { return table_.name; }
    int threads() const { return workers_->threads(); }
    int nodes() const { return nodes_.count(); }
    size_t state_bytes() const { return layers_.place_bytes(); }
    int home(int slot) const { return slots_.home(slot); }  // NUMA node of an open slot
    const uint8_t* place(int slot) const { return place_of(slot); }
    int64_t bytes_moved() const { return bytes_moved_; }
    double run_seconds() const { return run_seconds_; }

  private:
    friend class StepStates;
    struct Call {
        StateStore* store;
        const RecurrentLayer* layer;
        const Matrix* rows;
        const Matrix* out;
        void (*work)(Call&, int64_t, int);
    };
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };

    // In floats: one row of outputs, a state of the layer, and the end of all.
    struct Scratch {
        size_t out, state, end;
    };

    uint8_t* place_of(int slot) const { return arena_.data() + slots_.place(slot) * layers_.place_bytes(); }
    void reserve_scratch(const RecurrentLayer& layer);
    void grow_scratch(size_t floats);
    int tokens_at_once(const RecurrentLayer& layer, int heads, int64_t count) const;
    Scratch scratch_of(const RecurrentLayer& layer, int heads, int64_t tokens) const;
    RecurArgs arguments(const Call& call, const RecurItem& part, float* scratch) const;
    void run_heads(const Call& call, const RecurItem& part, int thread);
    void run_held(const RecurrentLayer& layer, const RecurArgs& call, const SequenceRun& s) const;
    void run_guesses(const RecurrentLayer& layer, const RecurArgs& call, const SequenceRun& s) const;
    void keep_inputs(const Call& call, const SequenceRun& s, int64_t column, int64_t columns) const;
    void keep_inputs_of(const Call& call, const SequenceRun& s, int first_head, int last_head) const;
    void run_parallel(Call& call, const std::vector<int64_t>& bounds, void (*work)(Call&, int64_t, int));
    void count_bytes(const RecurrentLayer& layer, const SequenceRun& s);
    using Work = std::function<void(size_t offset, size_t bytes)>;
    void over_memory(std::vector<int> slots, size_t unit, const Work& work);
    void populate(const std::vector<int>& slots);

    const KernelTable& table_;
    const ActType type_, state_type_;
    std::shared_ptr<Workers> workers_;
    const NumaNodes nodes_;
    NodeQueues queues_;
    const RecurrentLayers layers_;
    StateSlots slots_;
    Arena arena_;
    std::mutex mutex_;
    RecurPlan plan_;
    std::vector<std::unique_ptr<float, Free>> scratch_;  // one per thread
    size_t scratch_size_ = 0;                            // floats
    int64_t bytes_moved_ = 0;
    double run_seconds_ = 0;
};

}  // namespace hpcdecode
