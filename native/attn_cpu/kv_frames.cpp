// What a KV cache with frames tells its owner, who moves pages.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kv_cache.h"

namespace hpcdecode {
namespace {

void check_size(int64_t size, int64_t expected) {
    if (size == expected) return;
    throw std::invalid_argument("marks: expected " + std::to_string(expected) + " bytes, got " + std::to_string(size));
}

}  // namespace

void KvCache::place_pages(const int32_t* frames, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.place_pages(frames, n);
}

void KvCache::copy_block(int32_t from, int32_t to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::min(from, to) < 0 || std::max(from, to) >= pool_.block_count())
        throw std::invalid_argument("expected blocks 0 to " + std::to_string(pool_.block_count() - 1) + ", got " +
                                    std::to_string(from) + " and " + std::to_string(to));
    pool_.copy_block(from, to);
}

std::vector<BlockTable::Copy> KvCache::take_copies() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pool_.take_copies();
}

void KvCache::mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.check_written(slots, counts, n);
    const int64_t ranges = pool_.nodes(), blocks = pool_.block_count() / ranges;
    check_size(size, n * ranges);
    std::fill(marks, marks + size, uint8_t{0});
    for (int i = 0; i < n; ++i) {
        const std::vector<int32_t>& held = pool_.blocks(slots[i]);
        for (size_t b = pool_.first_block(slots[i], counts[i], all); b < held.size(); ++b)
            marks[i * ranges + held[b] / blocks] = 1;
    }
}

std::vector<int32_t> KvCache::written_blocks(const int32_t* slots, const int32_t* counts, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.check_written(slots, counts, n);
    std::vector<int32_t> written;
    for (int i = 0; i < n; ++i) {
        const std::vector<int32_t>& held = pool_.blocks(slots[i]);
        if (counts[i] > 0)
            written.insert(written.end(), held.begin() + pool_.first_block(slots[i], counts[i], false), held.end());
    }
    return written;
}

void KvCache::mark_used(uint8_t* marks, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_size(size, pool_.block_count());
    for (int32_t b = 0; b < pool_.block_count(); ++b) marks[b] = pool_.references(b) > 0;
}

}  // namespace hpcdecode
