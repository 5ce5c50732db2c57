// The interface of threads that help the caller with one job at a time.
#pragma once
#include <memory>
#include <vector>

namespace hpcdecode {

class Workers {
  public:
    using Work = void (*)(void* context, int thread);  // takes items until none are left; thread 0 is the caller

    virtual ~Workers() = default;
    virtual int threads() const = 0;

    // Runs `work` on the calling thread and on others; returns when all that joined have left. Calls exclude each
    // other.
    virtual void run(Work work, void* context) = 0;
};

// Returns torch's OpenMP threads if `team` is set and there are any, else a pool of threads. Throws
// std::invalid_argument. cpus: One CPU per thread to pin workers to, or empty. The calling thread is not pinned.
std::shared_ptr<Workers> make_workers(bool team, int threads, const std::vector<int>& cpus);

}  // namespace hpcdecode
