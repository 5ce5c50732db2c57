// Runs parallel work on the OpenMP threads that torch's GEMMs use. They are awake already, and the process does not
// have more threads than cores.
#pragma once
#include <algorithm>
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

// The same with work(part, parts).
template <class Work>
void run_team(int threads, int parts, const Work& work) {
    const auto enter = [](void* data, int part, int parts) { (*static_cast<const Work*>(data))(part, parts); };
    run_team(threads, parts, enter, const_cast<Work*>(&work));
}

// Calls work(item) for items 0 .. count - 1, those that follow each other on one thread.
template <class Work>
void run_shares(int threads, int64_t count, const Work& work) {
    const auto own = [&](int part, int parts) {
        for (int64_t i = share(count, part, parts); i < share(count, part + 1, parts); ++i) work(i);
    };
    run_team(threads, static_cast<int>(std::min<int64_t>(count, threads)), own);
}

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
