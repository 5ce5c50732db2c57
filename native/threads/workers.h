// Threads that help the caller through one job at a time.
#pragma once
#include <memory>
#include <vector>

namespace hpcdecode {

class Workers {
  public:
    using Work = void (*)(void* context, int thread);  // takes items until there are none; thread 0 is the caller

    virtual ~Workers() = default;
    virtual int threads() const = 0;

    // Runs `work` here and on other threads; returns when all that joined have left. Calls exclude each other.
    virtual void run(Work work, void* context) = 0;
};

// On torch's OpenMP threads if `team` and there are any, else threads of its own. `cpus`, if not empty, names one CPU
// per thread; the caller's own is left alone. Throws std::invalid_argument.
std::shared_ptr<Workers> make_workers(bool team, int threads, const std::vector<int>& cpus);

}  // namespace hpcdecode
