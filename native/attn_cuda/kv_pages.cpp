// What a KV cache with frames tells its owner, who moves pages.
#include <utility>

#include "kv_cache.h"

namespace hpcdecode {

void KvCache::place_pages(const int32_t* frames, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    placed_.place(frames, n);
    ++version_;
}

std::vector<BlockTable::Copy> KvCache::take_copies() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(left_copies_, {});
}

void KvCache::mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.mark_ranges(slots, counts, n, all, marks, size);
}

std::vector<int32_t> KvCache::written_blocks(const int32_t* slots, const int32_t* counts, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return table_.written_blocks(slots, counts, n);
}

void KvCache::mark_used(uint8_t* marks, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.mark_used(marks, size);
}

}  // namespace hpcdecode
