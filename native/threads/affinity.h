// Threads and the CPUs that they run on.
#pragma once
#include <vector>

namespace hpcdecode {

// Throws std::invalid_argument unless `cpus` is empty or one CPU of this process's a thread, and `threads` is sane.
void check_cpus(int threads, const std::vector<int>& cpus);

// Keeps the calling thread on `cpu`; does nothing for -1.
void pin(int cpu);

}  // namespace hpcdecode
