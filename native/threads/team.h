// Runs parallel work on the OpenMP threads that torch's GEMMs use. They are awake already, and the process does not
// have more threads than cores.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "workers.h"

namespace hpcdecode {

// Returns where the share of a member begins if `members` threads divide `count` items.
inline int64_t share(int64_t count, int64_t member, int64_t members) { return count * member / members; }

// Calls work(data, part, parts) for part 0 .. parts - 1 in parallel. May call with fewer parts, down to one.
// threads: Torch's number of threads. The team has this size even for fewer parts, because the OpenMP runtime ends
//   threads that a smaller team leaves out.
void run_team(int threads, int parts, void (*work)(void* data, int part, int parts), void* data);

// Returns whether the process has an OpenMP runtime to run teams on.
bool has_team();

// Workers that are torch's OpenMP threads.
class TeamWorkers : public Workers {
  public:
    // cpus: One CPU per thread to pin workers to, or empty. The calling thread is not pinned.
    // Throws std::invalid_argument.
    TeamWorkers(int threads, std::vector<int> cpus);
    int threads() const override { return threads_; }
    void run(Work work, void* context) override;

  private:
    std::mutex mutex_;
    int threads_;
    std::vector<int> cpus_;
};

}  // namespace hpcdecode
