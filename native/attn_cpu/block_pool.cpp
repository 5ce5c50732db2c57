#include "block_pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "crc32c.h"

namespace hpcdecode {
namespace {

static_assert(kWindowStep % kChunk == 0, "kernels read whole chunks, from the one on in which a window begins");

// Gives blocks of all layers one size.
std::vector<LayerLayout> even_out(std::vector<LayerLayout> layers) {
    size_t most = 0;
    for (const LayerLayout& l : layers) most = std::max(most, l.block_bytes);
    for (LayerLayout& l : layers) l.block_bytes = PlacedPages::even_bytes(most);
    return layers;
}

// Returns whether index keys have a strip of their own, in which they lie side by side as they are read: blocks of
// frames, and those that layers share, have them behind K and V.
bool has_index_strip(const LayerLayout& l) { return l.stride == l.kv_bytes && l.block_bytes > l.kv_bytes; }

std::vector<int64_t> bounds_of(const NumaNodes& nodes, int64_t blocks, int range_blocks) {
    return range_blocks == 0 ? nodes.cut(blocks) : PlacedPages::bounds(blocks, range_blocks);
}

}  // namespace

BlockPool::Layout BlockPool::lay_out_pool(const std::vector<LayerShape>& shapes, KvType type, int block_tokens,
                                          bool framed, bool windowed) {
    if (framed && windowed) throw std::invalid_argument("windowed: expected a KV cache without frames");
    Layout out{lay_out(shapes, type, block_tokens), {Window{}}, {}, false};
    if (windowed) {
        LayerGroups groups = group_layers(out.layers);
        if (groups.dropping()) {
            const auto stride = static_cast<size_t>(groups.block_bytes);
            for (size_t i = 0; i < out.layers.size(); ++i) {
                LayerLayout& l = out.layers[i];
                l.group = groups.group[i];
                l.offset = static_cast<size_t>(groups.offsets[i]);
                l.index_offset = l.offset + l.kv_bytes;
                l.stride = l.index_stride = stride;
            }
            out.groups = std::move(groups.windows);
            out.strips = {{0, stride}};
            out.together = true;
            return out;
        }
    }
    if (framed) out.layers = even_out(std::move(out.layers));
    for (LayerLayout& l : out.layers) {
        l.stride = framed ? l.block_bytes : l.kv_bytes;
        l.index_stride = l.block_bytes - l.kv_bytes;
        out.strips.push_back({0, l.stride});
        if (has_index_strip(l)) out.strips.push_back({0, l.index_stride});
    }
    return out;
}

BlockPool::BlockPool(const std::vector<LayerShape>& layers, KvType type, int64_t capacity_tokens, int max_sequences,
                     int block_tokens, const NumaNodes& nodes, const FrameOptions& frames, bool windowed, int lookahead)
    : BlockPool(lay_out_pool(layers, type, block_tokens, frames.range_blocks > 0, windowed), type, capacity_tokens,
                max_sequences, block_tokens, nodes, frames, lookahead) {}

BlockPool::BlockPool(Layout layout, KvType type, int64_t capacity_tokens, int max_sequences, int block_tokens,
                     const NumaNodes& nodes, const FrameOptions& frames, int lookahead)
    : BlockTable(
          block_tokens,
          bounds_of(nodes, count_blocks(capacity_tokens, block_tokens, layout.groups.size()), frames.range_blocks),
          max_sequences, frames.range_blocks > 0, layout.groups, lookahead),
      type_(type),
      layers_(std::move(layout.layers)),
      strips_(std::move(layout.strips)),
      together_(layout.together),
      placed_(frames, BlockTable::nodes()),
      arena_(place()),
      used_pages_(arena_.size() / kHugePage + 1) {
    if (framed()) {
        found_.resize(max_sequences);
        return;
    }
    const std::vector<int64_t> bounds = nodes.cut(block_count());
    for (int i = 0; i < nodes.count(); ++i)
        for (const Strip& s : strips_)
            arena_.bind(s.offset + bounds[i] * s.block_bytes, (bounds[i + 1] - bounds[i]) * s.block_bytes,
                        nodes.number(i));
}

// Says where the strips lie, and their layers; returns the bytes of the arena. Pages have frames in their place.
size_t BlockPool::place() {
    if (framed()) return layers_.front().block_bytes * placed_.blocks();
    size_t end = 0;
    for (Strip& s : strips_) {
        s.offset = end;
        end += (s.block_bytes * block_count() + 4095) / 4096 * 4096;
    }
    if (together_) return end;
    const Strip* strip = strips_.data();
    for (LayerLayout& l : layers_) {
        l.offset = strip++->offset;
        if (has_index_strip(l)) l.index_offset = strip++->offset;
    }
    return end;
}

size_t BlockPool::block_bytes() const {
    size_t total = 0;
    for (const Strip& s : strips_) total += s.block_bytes;
    return total;
}

std::vector<size_t> BlockPool::extend(const int32_t* slots, const int32_t* counts, int n) {
    const std::vector<Copy> copies = BlockTable::extend(slots, counts, n);
    if (framed()) {
        copies_.insert(copies_.end(), copies.begin(), copies.end());
        return {};
    }
    for (const Copy& copy : copies)
        for (const Strip& s : strips_) std::memcpy(at(s, copy.second), at(s, copy.first), s.block_bytes);
    std::vector<size_t> pages;
    for (const int32_t block : taken()) use(block, pages);
    return pages;
}

void BlockPool::use(int32_t block, std::vector<size_t>& pages) {
    for (const Strip& s : strips_) {
        const size_t begin = s.offset + block * s.block_bytes, end = begin + s.block_bytes;
        for (size_t page = begin / kHugePage; page * kHugePage < end; ++page) {
            if (!used_pages_[page]) pages.push_back(page);
            used_pages_[page] = true;
        }
    }
}

HeadView BlockPool::view(int layer, int head, int slot) const {
    const LayerLayout& l = layers_[layer];
    const std::vector<int32_t>& held = framed() ? found_[slot] : blocks(slot, l.group);
    return {arena_.data() + l.offset + head * l.head.head_bytes, held.data(), l.stride, &l.head};
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
    return {arena_.data() + l.index_offset, blocks(slot, l.group).data(), l.index_stride, &l.index};
}

std::vector<int32_t> BlockPool::some_blocks(int slot, int64_t first, size_t size) const {
    const std::vector<int32_t> some = held_blocks(slot);
    const auto held = static_cast<int64_t>(some.size()), count = static_cast<int64_t>(size / block_bytes());
    if (size % block_bytes() != 0 || first < 0 || first > held || count > held - first) {
        throw std::invalid_argument("slot " + std::to_string(slot) + " holds " + std::to_string(held) + " blocks of " +
                                    std::to_string(block_bytes()) + " bytes: expected some of them from block " +
                                    std::to_string(first) + " on, got " + std::to_string(size) + " bytes");
    }
    return {some.begin() + first, some.begin() + first + count};
}

uint32_t BlockPool::copy_out(int slot, int64_t first, uint8_t* to, size_t size) const {
    uint32_t sum = 0;
    for (const int32_t block : some_blocks(slot, first, size)) {
        for (const Strip& s : strips_) {
            std::memcpy(to, at(s, block), s.block_bytes);
            sum = crc32c(to, s.block_bytes, sum);
            to += s.block_bytes;
        }
    }
    return sum;
}

void BlockPool::copy_in(int slot, int64_t first, const uint8_t* from, size_t size) {
    for (const int32_t block : some_blocks(slot, first, size)) {
        for (const Strip& s : strips_) {
            std::memcpy(arena_.data() + s.offset + block * s.block_bytes, from, s.block_bytes);
            from += s.block_bytes;
        }
    }
}

}  // namespace hpcdecode
