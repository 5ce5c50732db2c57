#include "thread_pool.h"

#include <chrono>

#include "affinity.h"
#include "futex.h"

namespace hpcdecode {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);  // ranks and GEMM threads share the cores

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
    wake_all(epoch_);
    for (std::thread& t : workers_) t.join();
}

void ThreadPool::run(Work work, void* context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) return work(context, 0);
    work_ = work;
    context_ = context;
    open_.store(1);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) wake_all(epoch_);
    work(context, 0);
    open_.store(0);
    if (spin([this] { return active_.load() == 0; })) return;
    caller_waits_.store(true);
    for (uint32_t left; (left = active_.load()) != 0;) sleep_while(active_, left);
    caller_waits_.store(false);
}

bool ThreadPool::wait_for_job(uint32_t seen) {
    if (!spin([&] { return epoch_.load() != seen; })) {
        sleepers_.fetch_add(1);
        while (epoch_.load() == seen) sleep_while(epoch_, seen);
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
        if (active_.fetch_sub(1) == 1 && caller_waits_.load()) wake_all(active_);
    }
}

}  // namespace hpcdecode
