// Blocks of a KV cache that move to other memory and back.
#include "kv_cache.h"

namespace hpcdecode {

int64_t KvCache::held_blocks(int slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(pool_.held_blocks(slot).size());
}

uint32_t KvCache::copy_out(int slot, int64_t first, uint8_t* to, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pool_.copy_out(slot, first, to, size);
}

void KvCache::copy_in(int slot, int64_t first, const uint8_t* from, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.copy_in(slot, first, from, size);
}

}  // namespace hpcdecode
