// The floor that attention is measured against: how fast the same threads read memory once.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "kernel_api.h"
#include "numa.h"
#include "thread_pool.h"

namespace hpcdecode {

// A touched huge-page buffer and threads to read it with; each NUMA node holds and reads a share.
class ReadProbe {
  public:
    // Throws std::invalid_argument. Arguments as in EngineOptions.
    ReadProbe(size_t bytes, int threads, const std::vector<int>& cpus, const std::string& isa,
              const std::vector<int>& nodes);
    double seconds();  // of reading every byte once
    size_t bytes() const { return arena_.size(); }
    const uint8_t* data() const { return arena_.data(); }

  private:
    void pass(bool write);

    const KernelTable& table_;
    ThreadPool pool_;
    NumaNodes nodes_;
    NodeQueues queues_;
    Arena arena_;
    std::vector<int64_t> bounds_;  // of the nodes' shares, in units of 1 MiB
};

}  // namespace hpcdecode
