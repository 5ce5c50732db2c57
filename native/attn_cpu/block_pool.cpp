#include "block_pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

// Gives blocks of all layers one size.
std::vector<LayerLayout> even_out(std::vector<LayerLayout> layers) {
    size_t most = 0;
    for (const LayerLayout& l : layers) most = std::max(most, l.block_bytes);
    for (LayerLayout& l : layers) l.block_bytes = PlacedPages::even_bytes(most);
    return layers;
}

std::vector<int64_t> bounds_of(const NumaNodes& nodes, int64_t blocks, int range_blocks) {
    return range_blocks == 0 ? nodes.cut(blocks) : PlacedPages::bounds(blocks, range_blocks);
}

size_t place(std::vector<LayerLayout>& layers, int32_t blocks, const FrameOptions& frames) {
    if (frames.range_blocks > 0) {
        for (LayerLayout& l : layers) l.offset = 0;
        return layers.front().block_bytes * frames.range_blocks * frames.frames;
    }
    size_t at = 0;
    for (LayerLayout& l : layers) {
        l.offset = at;
        at += (l.block_bytes * blocks + 4095) / 4096 * 4096;
    }
    return at;
}

}  // namespace

BlockPool::BlockPool(const std::vector<LayerShape>& layers, KvType type, int64_t capacity_tokens, int max_sequences,
                     int block_tokens, const NumaNodes& nodes, const FrameOptions& frames)
    : BlockTable(block_tokens, bounds_of(nodes, count_blocks(capacity_tokens, block_tokens), frames.range_blocks),
                 max_sequences, frames.range_blocks > 0),
      type_(type),
      layers_(frames.range_blocks > 0 ? even_out(lay_out(layers, type, block_tokens))
                                      : lay_out(layers, type, block_tokens)),
      placed_(frames, BlockTable::nodes()),
      arena_(place(layers_, block_count(), frames)),
      used_pages_(arena_.size() / kHugePage + 1) {
    if (framed()) {
        found_.resize(max_sequences);
        return;
    }
    const std::vector<int64_t> bounds = nodes.cut(block_count());
    for (int i = 0; i < nodes.count(); ++i)
        for (const LayerLayout& l : layers_)
            arena_.bind(l.offset + bounds[i] * l.block_bytes, (bounds[i + 1] - bounds[i]) * l.block_bytes,
                        nodes.number(i));
}

std::vector<size_t> BlockPool::extend(const int32_t* slots, const int32_t* counts, int n) {
    const std::vector<Copy> copies = BlockTable::extend(slots, counts, n);
    if (framed()) {
        copies_.insert(copies_.end(), copies.begin(), copies.end());
        return {};
    }
    for (const Copy& copy : copies) {
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
    const std::vector<int32_t>& held = framed() ? found_[slot] : blocks(slot);
    return {arena_.data() + l.offset + head * l.head.head_bytes, held.data(), l.block_bytes, &l.head};
}

void BlockPool::find_blocks(const int32_t* slots, const int32_t* counts, int n, bool all) {
    if (!framed()) return;
    for (int i = 0; i < n; ++i) {
        const std::vector<int32_t>& held = blocks(slots[i]);
        std::vector<int32_t>& found = found_[slots[i]];
        found.clear();
        placed_.find_all(held, first_block(slots[i], counts[i], all), found);
    }
}

void BlockPool::copy_block(int32_t from, int32_t to) {
    const int32_t source = placed_.find(from), target = placed_.find(to);
    if (source < 0 || target < 0) throw std::logic_error("a block that is copied lies in no frame");
    const size_t size = layers_.front().block_bytes;
    std::memcpy(arena_.data() + target * size, arena_.data() + source * size, size);
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
