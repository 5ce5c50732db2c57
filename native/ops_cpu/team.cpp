#include "team.h"

#include <dlfcn.h>

namespace hpcdecode::ops {
namespace {

// The entry points that compilers emit for `#pragma omp parallel`; GCC's, LLVM's and Intel's runtimes all have them.
// Looked up in torch's own library: a second runtime in the process would bring a second set of threads.
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
};

void enter(void* call) {
    const Call& c = *static_cast<const Call*>(call);
    c.work(c.data, runtime().thread(), runtime().threads());
}

}  // namespace

void run_team(int threads, void (*work)(void*, int, int), void* data) {
    if (threads < 2 || !runtime().complete()) return work(data, 0, 1);
    Call call{work, data};
    runtime().parallel(enter, &call, static_cast<unsigned>(threads), 0);
}

}  // namespace hpcdecode::ops
