#include "kv_store.h"

#include <cstring>

namespace hpcdecode {
namespace {

size_t place(std::vector<LayerLayout>& layers, int32_t blocks) {
    size_t at = 0;
    for (LayerLayout& l : layers) {
        l.offset = at;
        at += (l.block_bytes * blocks + 4095) / 4096 * 4096;
    }
    return at;
}

}  // namespace

KvStore::KvStore(const std::vector<LayerShape>& layers, KvType type, int64_t capacity_tokens, int max_sequences,
                 int block_tokens, const NumaNodes& nodes)
    : BlockTable(block_tokens, nodes.cut(count_blocks(capacity_tokens, block_tokens)), max_sequences),
      type_(type),
      layers_(lay_out(layers, type, block_tokens)),
      arena_(place(layers_, block_count())) {
    const std::vector<int64_t> bounds = nodes.cut(block_count());
    for (int i = 0; i < nodes.count(); ++i)
        for (const LayerLayout& l : layers_)
            arena_.bind(l.offset + bounds[i] * l.block_bytes, (bounds[i + 1] - bounds[i]) * l.block_bytes,
                        nodes.number(i));
}

void KvStore::extend(const int32_t* slots, const int32_t* counts, int n) {
    for (const Copy& copy : BlockTable::extend(slots, counts, n)) {
        for (const LayerLayout& l : layers_) {
            uint8_t* base = arena_.data() + l.offset;
            std::memcpy(base + copy.second * l.block_bytes, base + copy.first * l.block_bytes, l.block_bytes);
        }
    }
}

HeadView KvStore::view(int layer, int head, int slot) const {
    const LayerLayout& l = layers_[layer];
    return {arena_.data() + l.offset + head * l.head.head_bytes, blocks(slot).data(), l.block_bytes, &l.head};
}

}  // namespace hpcdecode
