// Pins threads to CPUs.
#pragma once
#include <vector>

namespace hpcdecode {

// Throws std::invalid_argument unless `threads` is sane and `cpus` is empty or names one CPU of this process per
// thread.
void check_cpus(int threads, const std::vector<int>& cpus);

// Pins the calling thread to `cpu`; does nothing for -1.
void pin(int cpu);

}  // namespace hpcdecode
