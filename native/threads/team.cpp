#include "team.h"

#include <dlfcn.h>

#include <algorithm>

#include "affinity.h"

namespace hpcdecode {
namespace {

// The entry points that compilers emit for `#pragma omp parallel`; GCC's, LLVM's and Intel's runtimes all have them.
// They are looked up in torch's own library, because a second runtime would bring a second set of threads.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*thread)() = nullptr;
    int (*threads)() = nullptr;

    Runtime() {
        void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        void* from = torch != nullptr ? torch : RTLD_DEFAULT;
        find(from, "GOMP_parallel", parallel);
        find(from, "omp_get_thread_num", thread);
        find(from, "omp_get_num_threads", threads);
    }

    template <class F>
    static void find(void* from, const char* name, F*& out) {
        out = reinterpret_cast<F*>(dlsym(from, name));
    }

    bool complete() const { return parallel != nullptr && thread != nullptr && threads != nullptr; }
};

const Runtime& runtime() {
    static const Runtime found;
    return found;
}

struct Call {
    void (*work)(void*, int, int);
    void* data;
    int parts;
};

void enter(void* call) {
    const Call& c = *static_cast<const Call*>(call);
    const int parts = std::min(c.parts, runtime().threads()), part = runtime().thread();
    if (part < parts) c.work(c.data, part, parts);
}

}  // namespace

bool has_team() { return runtime().complete(); }

void run_team(int threads, int parts, void (*work)(void*, int, int), void* data) {
    if (threads < 2 || parts < 2 || !has_team()) return work(data, 0, 1);
    Call call{work, data, parts};
    runtime().parallel(enter, &call, static_cast<unsigned>(threads), 0);
}

TeamWorkers::TeamWorkers(int threads, std::vector<int> cpus) : threads_(threads), cpus_(std::move(cpus)) {
    check_cpus(threads_, cpus_);
}

void TeamWorkers::run(Work work, void* context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto enter = [&](int thread, int) {
        static thread_local int at = -1;  // the runtime may replace its threads
        if (thread > 0 && !cpus_.empty() && cpus_[thread] != at) pin(at = cpus_[thread]);
        work(context, thread);
    };
    run_team(threads_, threads_, enter);
}

}  // namespace hpcdecode
