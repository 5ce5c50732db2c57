#include "adapter_rows.h"

#include <cstring>

#include "row_memory.h"

namespace hpcdecode::ops {

AdapterRows::AdapterRows(const Rows& adapters, int64_t first, int64_t last, int64_t count) {
    const auto adapter_of = [&](int64_t r) {
        int64_t adapter;
        std::memcpy(&adapter, adapters.data + r * adapters.row_bytes, sizeof adapter);
        return adapter >= 0 && adapter < count ? adapter : -1;
    };
    std::vector<int64_t> counts(count);
    int64_t all = 0;
    for (int64_t r = first; r < last; ++r)
        if (const int64_t adapter = adapter_of(r); adapter >= 0) ++counts[adapter], ++all;
    if (all == 0) return;
    std::vector<int64_t> ends(count);
    for (int64_t a = 0, at = 0; a < count; at += counts[a++]) {
        ends[a] = at;
        if (counts[a] > 0) runs.push_back({a, at, counts[a]});
    }
    order.resize(all);
    for (int64_t r = first; r < last; ++r)
        if (const int64_t adapter = adapter_of(r); adapter >= 0) order[ends[adapter]++] = r;
}

Rows AdapterRows::gathered(const AdapterRun& run, const Rows& x, int64_t bytes, std::vector<char>& memory) const {
    const int64_t* rows = order.data() + run.first;
    const int64_t step = run.count > 1 ? rows[1] - rows[0] : 1;
    bool even = true;
    for (int64_t i = 1; i < run.count && even; ++i) even = rows[i] - rows[i - 1] == step;
    if (even) return {x.data + rows[0] * x.row_bytes, step * x.row_bytes};
    const Rows made = rows_in(memory, run.count, bytes);
    for (int64_t i = 0; i < run.count; ++i)
        std::memcpy(made.data + i * made.row_bytes, x.data + rows[i] * x.row_bytes, bytes);
    return made;
}

}  // namespace hpcdecode::ops
