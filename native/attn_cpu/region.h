// One parallel region with all attention of a layer: that of prompts, and that of a KV cache beside it.
#pragma once
#include <vector>

#include "kv_items.h"
#include "prefill_items.h"
#include "thread_clock.h"
#include "workers.h"

namespace hpcdecode {

enum WorkKind { kAttend, kAppend, kPack, kPrompt, kWorkKinds };

// What one item took.
// group, token: Tell the items of a kind apart: those of one sequence and head have the same group.
struct ItemTime {
    WorkKind kind;
    int64_t group, token;
    double estimate, seconds;
};

// The seconds of all threads together, by kind of work.
struct KindSeconds {
    double of[kWorkKinds] = {};
    double sum() const { return of[kAttend] + of[kAppend] + of[kPack] + of[kPrompt]; }
};

// Each thread takes the next item of the longer one of two queues, prompts and decode rows, both of which begin with
// their longest items: longest processing time first. FluidInfer packs instead: the longest iteration goes to a worker
// each, and the gaps below the longest of all are filled with what still fits, by the estimates. A thread that takes an
// item when it is idle fills the same gaps by the time that items really take, so estimates that are off cost less, and
// no thread is idle while any item is left. So the end is never later than the mean of all work plus the last item.
//
// Prompts' items that pack come before all others. A thread that comes to attention over K and V that another thread
// still packs takes decode rows, or appends, meanwhile.
struct Region {
    int threads;
    KvItems* kv;  // or null
    PromptItems& prompts;
    const std::vector<uint8_t*>& prompt_scratch;  // one per thread
    ThreadClock& clock;
    std::vector<ItemTime>* trace;  // if not null, the calling thread runs all items, and notes what each took
};

// Returns whether work is worth waking threads: multiplications of prompts, and bytes of a KV cache.
bool worth_waking(double products, int64_t bytes);

// Returns what a thread does next, given the estimated seconds of the next item of rows and of prompts, -1 if there is
// none. Prompts of 0 seconds wait for others to pack: then a thread appends if there is anything to append.
enum class NextWork { kRows, kPrompt, kAppendOrPrompt, kAppend };
NextWork next_work(double rows, double prompts);

// Runs all items on the workers, or on the calling thread alone if there are none.
KindSeconds run_region(const Region& region, Workers* workers);

}  // namespace hpcdecode
