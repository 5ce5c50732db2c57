// Memory for copies of rows: an odd number of cache lines apart, so that those of a tile fall into different sets.
#pragma once
#include <cstdint>
#include <vector>

#include "fused_kernel.h"

namespace hpcdecode::ops {

// Returns the bytes from row to row.
inline int64_t row_distance(int64_t bytes) { return ((bytes + kLine - 1) / kLine | 1) * kLine; }

// Returns rows of so many bytes in `memory`, which grows if it is too small; they begin at a cache line.
inline Rows rows_in(std::vector<char>& memory, int64_t rows, int64_t bytes) {
    const int64_t apart = row_distance(bytes);
    const auto needed = static_cast<size_t>(rows * apart + kLine);
    if (memory.size() < needed) memory.resize(needed);
    return {memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kLine - 1)), apart};
}

}  // namespace hpcdecode::ops
