// Parallel work on the OpenMP threads that torch's matrix products use, so that it starts on warm threads and none of
// the process's threads stands in another's way.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "workers.h"

namespace hpcdecode {

// Where the share of a member begins, of `count` that `members` divide.
inline int64_t share(int64_t count, int64_t member, int64_t members) { return count * member / members; }

// Calls work(data, part, parts) for part 0 .. parts - 1 at once, on that many of `threads` threads, torch's number:
// the runtime ends threads that a smaller team leaves out. May call with fewer parts, down to one here.
void run_team(int threads, int parts, void (*work)(void* data, int part, int parts), void* data);

// Whether the process has an OpenMP runtime to run teams on.
bool has_team();

// Torch's threads as workers.
class TeamWorkers : public Workers {
  public:
    // `cpus`, if not empty, names one CPU per thread; the caller's own is left alone. Throws std::invalid_argument.
    TeamWorkers(int threads, std::vector<int> cpus);
    int threads() const override { return threads_; }
    void run(Work work, void* context) override;

  private:
    std::mutex mutex_;
    int threads_;
    std::vector<int> cpus_;
};

}  // namespace hpcdecode
