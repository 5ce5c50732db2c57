#include "thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#include "affinity.h"

namespace hpcdecode {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);  // ranks and GEMM threads share the cores

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Returns true as soon as `done` does, false when the time of spinning is over.
template <class Done>
bool spin(Done done) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < until);
    return done();
}

void futex(std::atomic<uint32_t>& word, int op, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpus) {
    check_cpus(threads, cpus);
    workers_.reserve(threads - 1);
    for (int i = 1; i < threads; ++i) {
        workers_.emplace_back(&ThreadPool::loop, this, i, cpus.empty() ? -1 : cpus[i]);
    }
}

ThreadPool::~ThreadPool() {
    stop_ = true;
    epoch_.fetch_add(1);
    futex(epoch_, FUTEX_WAKE, 1 << 30);
    for (std::thread& t : workers_) t.join();
}

void ThreadPool::run(Work work, void* context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) return work(context, 0);
    work_ = work;
    context_ = context;
    open_.store(1);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) futex(epoch_, FUTEX_WAKE, 1 << 30);
    work(context, 0);
    open_.store(0);
    if (spin([this] { return active_.load() == 0; })) return;
    caller_waits_.store(true);
    for (uint32_t left; (left = active_.load()) != 0;) futex(active_, FUTEX_WAIT, left);
    caller_waits_.store(false);
}

bool ThreadPool::wait_for_job(uint32_t seen) {
    if (!spin([&] { return epoch_.load() != seen; })) {
        sleepers_.fetch_add(1);
        while (epoch_.load() == seen) futex(epoch_, FUTEX_WAIT, seen);
        sleepers_.fetch_sub(1);
    }
    return !stop_.load();
}

void ThreadPool::loop(int thread, int cpu) {
    pin(cpu);
    uint32_t seen = 0;
    while (wait_for_job(seen)) {
        seen = epoch_.load();
        active_.fetch_add(1);
        if (open_.load() != 0) work_(context_, thread);
        if (active_.fetch_sub(1) == 1 && caller_waits_.load()) futex(active_, FUTEX_WAKE, 1);
    }
}

}  // namespace hpcdecode
