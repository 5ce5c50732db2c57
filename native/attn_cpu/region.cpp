#include "region.h"

namespace hpcdecode {
namespace {

constexpr double kInlineProducts = 1 << 20;  // fewer than this are not worth waking threads
constexpr int64_t kInlineBytes = 64 << 10;   // nor are fewer bytes of a KV cache

class Run {
  public:
    explicit Run(const Region& region) : r_(region), own_(region.threads) {}

    void work(int thread) {
        const int node = r_.kv ? r_.kv->node(thread) : 0;
        last_of(thread) = seconds_now();
        while (step(node, thread)) {
        }
        r_.clock.add(thread, own_[thread].seconds.sum());
    }

    KindSeconds seconds() const {
        KindSeconds all;
        for (const Worker& own : own_)
            for (int kind = 0; kind < kWorkKinds; ++kind) all.of[kind] += own.seconds.of[kind];
        return all;
    }

  private:
    struct alignas(64) Worker {
        KindSeconds seconds;
        double last = 0;
    };
    double& last_of(int thread) { return own_[thread].last; }

    // Runs the longest of the next items; returns false if none is left.
    bool step(int node, int thread) {
        const double rows = r_.kv ? r_.kv->next_seconds(node) : -1, prompts = r_.prompts.next_seconds();
        switch (next_work(rows, prompts)) {
            case NextWork::kRows:
                run_rows(node, thread);
                return true;
            case NextWork::kPrompt:
                run_prompt(thread);
                return true;
            case NextWork::kAppendOrPrompt:
                if (!run_append(node, thread)) run_prompt(thread);
                return true;
            case NextWork::kAppend:
                break;
        }
        return run_append(node, thread);
    }

    void run_rows(int node, int thread) {
        const int64_t i = r_.kv->take(node);
        if (i < 0) return;
        r_.kv->run(i, thread);
        done(thread, kAttend, i, 0, r_.trace ? r_.kv->seconds(i) : 0);
    }

    bool run_append(int node, int thread) {
        const int64_t i = r_.kv ? r_.kv->take_append(node) : -1;
        if (i < 0) return false;
        r_.kv->run_append(i);
        done(thread, kAppend, r_.kv->append_group(i), i, 0);
        return true;
    }

    void run_prompt(int thread) {
        const int64_t i = r_.prompts.take();
        if (i < 0) return;
        if (!r_.prompts.ready(i)) {
            r_.prompts.wait_until_packed();
            last_of(thread) = seconds_now();  // it had nothing to do
        }
        r_.prompts.run(i, r_.prompt_scratch[thread]);
        const PromptItems::Item& item = r_.prompts.item(i);
        done(thread, r_.prompts.packs(i) ? kPack : kPrompt, r_.prompts.group(item), item.token,
             r_.prompts.seconds(item));
    }

    void done(int thread, WorkKind kind, int64_t group, int64_t token, double estimate) {
        Worker& own = own_[thread];
        const double now = seconds_now(), took = now - own.last;
        own.last = now;
        own.seconds.of[kind] += took;
        if (r_.trace) r_.trace->push_back({kind, group, token, estimate, took});
    }

    const Region& r_;
    std::vector<Worker> own_;
};

}  // namespace

bool worth_waking(double products, int64_t bytes) { return products > kInlineProducts || bytes > kInlineBytes; }

NextWork next_work(double rows, double prompts) {
    if (prompts > rows) return prompts > 0 ? NextWork::kPrompt : NextWork::kAppendOrPrompt;
    return rows >= 0 ? NextWork::kRows : NextWork::kAppend;
}

KindSeconds run_region(const Region& region, Workers* workers) {
    Run run(region);
    const auto work = [](void* context, int thread) { static_cast<Run*>(context)->work(thread); };
    workers && !region.trace ? workers->run(work, &run) : work(&run, 0);
    return run.seconds();
}

}  // namespace hpcdecode
