// The blocks of a KV cache on a device: where they lie, and which sequences hold them.
#include <algorithm>

#include "kv_cache.h"

namespace hpcdecode {

std::vector<KvCache::Strip> KvCache::strips() const {
    if (groups_.dropping()) return {{const_cast<uint8_t*>(arena_.as<uint8_t>()), groups_.block_bytes}};
    std::vector<Strip> found;
    for (const LayerArgs& l : layers_) found.push_back({l.base, l.head.block_bytes});
    return found;
}

// Gives the blocks of all layers one size if they share frames or blocks; returns the bytes of the arena.
int64_t KvCache::place_layers() {
    if (groups_.dropping()) {
        for (LayerArgs& l : layers_) l.head.block_bytes = groups_.block_bytes;
        return groups_.block_bytes * table_.block_count();
    }
    if (!placed_.framed()) return static_cast<int64_t>(bytes_per_block(layers_)) * table_.block_count();
    int64_t most = 0;
    for (const LayerArgs& l : layers_) most = std::max(most, l.head.block_bytes);
    for (LayerArgs& l : layers_) l.head.block_bytes = PlacedPages::even_bytes(most);
    return layers_.front().head.block_bytes * placed_.blocks();
}

void KvCache::release(const int32_t* slots, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.release(slots, n);
    ++version_;
}

void KvCache::fork(int src, int dst) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.fork(src, dst);
    ++version_;
}

void KvCache::truncate(int slot, int64_t length) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.truncate(slot, length);
    ++version_;
}

std::vector<int32_t> KvCache::blocks(int slot) {
    const std::lock_guard lock(mutex_);
    return table_.held_blocks(slot);
}

int64_t KvCache::length(int slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return table_.length(slot);
}

void KvCache::check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.check();
}

}  // namespace hpcdecode
