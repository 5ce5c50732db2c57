// The floor that attention is measured against: how fast the same threads read memory once.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "kernel_api.h"
#include "thread_pool.h"

namespace hpcdecode {

// A touched huge-page buffer and threads to read it with.
class ReadProbe {
  public:
    ReadProbe(size_t bytes, int threads, const std::vector<int>& cpus,
              const std::string& isa);  // std::invalid_argument
    double seconds();                   // of reading every byte once
    size_t bytes() const { return arena_.size(); }

  private:
    const KernelTable& table_;
    Arena arena_;
    ThreadPool pool_;
};

}  // namespace hpcdecode
