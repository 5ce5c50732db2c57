#include "block_pool.h"

#include <cstring>
#include <stdexcept>
#include <string>

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

BlockPool::BlockPool(const std::vector<LayerShape>& layers, KvType type, int64_t capacity_tokens, int max_sequences,
                     int block_tokens, const NumaNodes& nodes)
    : BlockTable(block_tokens, nodes.cut(count_blocks(capacity_tokens, block_tokens)), max_sequences),
      type_(type),
      layers_(lay_out(layers, type, block_tokens)),
      arena_(place(layers_, block_count())),
      used_pages_(arena_.size() / kHugePage + 1) {
    const std::vector<int64_t> bounds = nodes.cut(block_count());
    for (int i = 0; i < nodes.count(); ++i)
        for (const LayerLayout& l : layers_)
            arena_.bind(l.offset + bounds[i] * l.block_bytes, (bounds[i + 1] - bounds[i]) * l.block_bytes,
                        nodes.number(i));
}

std::vector<size_t> BlockPool::extend(const int32_t* slots, const int32_t* counts, int n) {
    for (const Copy& copy : BlockTable::extend(slots, counts, n)) {
        for (const LayerLayout& l : layers_) {
            uint8_t* base = arena_.data() + l.offset;
            std::memcpy(base + copy.second * l.block_bytes, base + copy.first * l.block_bytes, l.block_bytes);
        }
    }
    std::vector<size_t> pages;
    for (int i = 0; i < n; ++i) {
        const std::vector<int32_t>& held = blocks(slots[i]);
        const int64_t before = (length(slots[i]) - counts[i] + block_tokens() - 1) / block_tokens();
        for (size_t b = before; b < held.size(); ++b) use(held[b], pages);
    }
    return pages;
}

void BlockPool::use(int32_t block, std::vector<size_t>& pages) {
    for (const LayerLayout& l : layers_) {
        const size_t begin = l.offset + block * l.block_bytes, end = begin + l.block_bytes;
        for (size_t page = begin / kHugePage; page * kHugePage < end; ++page) {
            if (!used_pages_[page]) pages.push_back(page);
            used_pages_[page] = true;
        }
    }
}

HeadView BlockPool::view(int layer, int head, int slot) const {
    const LayerLayout& l = layers_[layer];
    return {arena_.data() + l.offset + head * l.head.head_bytes, blocks(slot).data(), l.block_bytes, &l.head};
}

HeadView BlockPool::index_view(int layer, int slot) const {
    const LayerLayout& l = layers_[layer];
    return {arena_.data() + l.offset + l.index_at, blocks(slot).data(), l.block_bytes, &l.index};
}

int64_t BlockPool::check_blocks(int slot, int64_t first, size_t size) const {
    const int64_t held = (length(slot) + block_tokens() - 1) / block_tokens();
    const int64_t count = static_cast<int64_t>(size / block_bytes());
    if (size % block_bytes() != 0 || first < 0 || first > held || count > held - first) {
        throw std::invalid_argument("slot " + std::to_string(slot) + " holds " + std::to_string(held) + " blocks of " +
                                    std::to_string(block_bytes()) + " bytes: expected some of them from block " +
                                    std::to_string(first) + " on, got " + std::to_string(size) + " bytes");
    }
    return count;
}

void BlockPool::copy_out(int slot, int64_t first, uint8_t* to, size_t size) const {
    const int64_t count = check_blocks(slot, first, size);
    for (int64_t b = first; b < first + count; ++b) {
        for (const LayerLayout& l : layers_) {
            std::memcpy(to, arena_.data() + l.offset + blocks(slot)[b] * l.block_bytes, l.block_bytes);
            to += l.block_bytes;
        }
    }
}

void BlockPool::copy_in(int slot, int64_t first, const uint8_t* from, size_t size) {
    const int64_t count = check_blocks(slot, first, size);
    for (int64_t b = first; b < first + count; ++b) {
        for (const LayerLayout& l : layers_) {
            std::memcpy(arena_.data() + l.offset + blocks(slot)[b] * l.block_bytes, from, l.block_bytes);
            from += l.block_bytes;
        }
    }
}

}  // namespace hpcdecode
