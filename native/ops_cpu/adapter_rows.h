// Rows of tokens by their adapters (LoRA): those of one adapter are multiplied together.
#pragma once
#include <cstdint>
#include <vector>

#include "fused_kernel.h"

namespace hpcdecode::ops {

// Some rows of one adapter: `order` from `first` on.
struct AdapterRun {
    int64_t adapter, first, count;
};

// Rows first .. last - 1 by adapter, each adapter's in their order. Those without one are left out.
class AdapterRows {
  public:
    // adapters: Of each row, int64; others than 0 .. count - 1 stand for none.
    AdapterRows(const Rows& adapters, int64_t first, int64_t last, int64_t count);

    bool empty() const { return runs.empty(); }

    // Returns the rows of x of a run: where they lie if they are evenly spaced, else copies in `memory`.
    Rows gathered(const AdapterRun& run, const Rows& x, int64_t bytes, std::vector<char>& memory) const;

    std::vector<AdapterRun> runs;
    std::vector<int64_t> order;
};

}  // namespace hpcdecode::ops
