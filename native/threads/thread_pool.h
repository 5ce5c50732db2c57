// A pool of threads, for ranks whose cores run no GEMMs.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "workers.h"

namespace hpcdecode {

class ThreadPool : public Workers {
  public:
    // Starts threads - 1 workers. Throws std::invalid_argument.
    // cpus: One CPU per thread to pin workers to, or empty. The calling thread is not pinned.
    ThreadPool(int threads, const std::vector<int>& cpus);
    ~ThreadPool() override;
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const override { return static_cast<int>(workers_.size()) + 1; }

    // Returns when all workers that joined have left. A worker that wakes too late to join is not waited for.
    void run(Work work, void* context) override;

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
