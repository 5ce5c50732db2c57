// The floor that attention is measured against: how fast the same threads read memory once.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace hpcdecode {

// Median GB/s over `passes`, each reading all of `bytes` in huge pages. Throws std::invalid_argument.
double read_bandwidth(size_t bytes, int threads, const std::vector<int>& cpus, int passes, const std::string& isa);

}  // namespace hpcdecode
