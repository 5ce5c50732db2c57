// The memory of a paged KV cache: a block table, and an arena with the blocks of every layer.
//
// Blocks of a layer lie side by side. Or layers are in groups, by their windows: then a block has the layers of one of
// them, side by side, and sequences hold only what windows still see.
//
// Or with as many of them as fit: then it has frames for pages, which the owner moves; see placed_pages.h.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "arena.h"
#include "block_table.h"
#include "layout.h"
#include "numa.h"
#include "placed_pages.h"

namespace hpcdecode {

class BlockPool : public BlockTable {
  public:
    BlockPool(const std::vector<LayerShape>& layers, KvType type, int64_t capacity_tokens, int max_sequences,
              int block_tokens, const NumaNodes& nodes, const FrameOptions& frames = {}, bool windowed = false,
              int lookahead = 0);

    // Extends the block table and makes the copies that forked blocks need. Returns the huge pages that hold new blocks
    // and held none before.
    std::vector<size_t> extend(const int32_t* slots, const int32_t* counts, int n);
    void populate(size_t huge_page) { arena_.populate(huge_page); }
    HeadView view(int layer, int head, int slot) const;
    HeadView index_view(int layer, int slot) const;                 // of the keys of the layer's indexer
    int node(int slot) const { return framed() ? 0 : home(slot); }  // NUMA node
    int node_count() const { return framed() ? 1 : nodes(); }

    // Of pools with frames.
    bool framed() const { return placed_.framed(); }
    const FrameOptions& frames() const { return placed_.options(); }
    size_t frame_bytes() const { return frames().range_blocks * layers_.front().block_bytes; }
    void place_pages(const int32_t* frames, int n) { placed_.place(frames, n); }
    // Finds the blocks of slots, all of them or those of their last counts[i] positions. Throws std::logic_error if one
    // of them lies in no frame.
    void find_blocks(const int32_t* slots, const int32_t* counts, int n, bool all);
    void copy_block(int32_t from, int32_t to);  // within a layer, as the pages were placed last
    std::vector<Copy> take_copies() { return std::exchange(copies_, {}); }  // what `extend` has left to be copied

    // Returns the first of the last `count` positions of a slot that has a place at a layer.
    int64_t first_written(int layer, int slot, int64_t count) const {
        return std::max(length(slot) - count, first_place(slot, layers_[layer].group) * block_tokens());
    }

    // Copies whole blocks of a slot, from the one on that it holds as number `first`, out of the arena or into it. In
    // the buffer a block has the bytes of all its layers, layer by layer. Throws std::invalid_argument for blocks that
    // the slot does not hold. What is copied out is in the processor's cache then, so its CRC-32C costs little.
    uint32_t copy_out(int slot, int64_t first, uint8_t* to, size_t size) const;
    void copy_in(int slot, int64_t first, const uint8_t* from, size_t size);
    size_t block_bytes() const;

    const std::vector<LayerLayout>& layers() const { return layers_; }
    KvType type() const { return type_; }
    size_t bytes() const { return arena_.size(); }
    const uint8_t* data() const { return arena_.data(); }

  private:
    // Memory in which blocks lie side by side, or those of one layer.
    struct Strip {
        size_t offset, block_bytes;
    };
    // What a layout needs before there is an arena.
    struct Layout {
        std::vector<LayerLayout> layers;
        std::vector<Window> groups;
        std::vector<Strip> strips;
        bool together;  // one strip has the blocks of all layers
    };
    static Layout lay_out_pool(const std::vector<LayerShape>& layers, KvType type, int block_tokens, bool framed,
                               bool windowed);

    BlockPool(Layout layout, KvType type, int64_t capacity_tokens, int max_sequences, int block_tokens,
              const NumaNodes& nodes, const FrameOptions& frames, int lookahead);
    size_t place();
    std::vector<int32_t> some_blocks(int slot, int64_t first, size_t size) const;
    void use(int32_t block, std::vector<size_t>& pages);
    uint8_t* at(const Strip& strip, int32_t block) const {
        return arena_.data() + strip.offset + block * strip.block_bytes;
    }

    KvType type_;
    std::vector<LayerLayout> layers_;
    std::vector<Strip> strips_;
    bool together_;
    PlacedPages placed_;
    Arena arena_;
    std::vector<bool> used_pages_;
    std::vector<std::vector<int32_t>> found_;  // by slot: where its blocks lie
    std::vector<Copy> copies_;
};

}  // namespace hpcdecode
