// Measures how fast threads read memory once: the floor that attention is compared with.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "kernel_api.h"
#include "numa.h"
#include "thread_pool.h"

namespace hpcdecode {

// Returns the seconds in which the workers read `data` once, in a straight line. The threads of every NUMA node begin
// with their node's share.
double read_seconds(const KernelTable& table, Workers& workers, const NumaNodes& nodes, NodeQueues& queues,
                    const uint8_t* data, size_t bytes);

// A touched buffer of huge pages, and threads to read it. Every NUMA node holds and reads a share.
class ReadProbe {
  public:
    // Throws std::invalid_argument. Arguments are those of KvCacheOptions.
    ReadProbe(size_t bytes, int threads, const std::vector<int>& cpus, const std::string& isa,
              const std::vector<int>& nodes);
    double seconds() { return read_seconds(table_, pool_, nodes_, queues_, arena_.data(), arena_.size()); }
    size_t bytes() const { return arena_.size(); }
    const uint8_t* data() const { return arena_.data(); }

  private:
    const KernelTable& table_;
    ThreadPool pool_;
    NumaNodes nodes_;
    NodeQueues queues_;
    Arena arena_;
};

}  // namespace hpcdecode
