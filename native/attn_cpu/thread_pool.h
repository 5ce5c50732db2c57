// Persistent threads that help the caller through one job at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hpcdecode {

class ThreadPool {
  public:
    using Work = void (*)(void* context, int thread);  // takes items until there are none; thread 0 is the caller

    // Starts threads - 1 workers. `cpus`, if not empty, names one CPU per thread; the caller's own is left alone.
    // Throws std::invalid_argument.
    ThreadPool(int threads, const std::vector<int>& cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs `work` here and on workers that wake in time; returns when all that joined have left.
    // A worker that wakes after the caller has finished its share is not waited for. Calls exclude each other.
    void run(Work work, void* context);

  private:
    void loop(int thread, int cpu);
    bool wait_for_job(uint32_t seen);

    std::mutex mutex_;
    std::vector<std::thread> workers_;
    Work work_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> open_{0};
    alignas(64) std::atomic<uint32_t> active_{0};
    std::atomic<bool> caller_waits_{false};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace hpcdecode
