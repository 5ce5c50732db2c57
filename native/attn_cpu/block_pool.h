// The memory of a paged KV cache: a block table, and an arena with the blocks of every layer.
#pragma once
#include <vector>

#include "arena.h"
#include "block_table.h"
#include "layout.h"
#include "numa.h"

namespace hpcdecode {

class BlockPool : public BlockTable {
  public:
    BlockPool(const std::vector<LayerShape>& layers, KvType type, int64_t capacity_tokens, int max_sequences,
              int block_tokens, const NumaNodes& nodes);

    // Extends the block table and makes the copies that forked blocks need. Returns the huge pages that hold new blocks
    // and held none before.
    std::vector<size_t> extend(const int32_t* slots, const int32_t* counts, int n);
    void populate(size_t huge_page) { arena_.populate(huge_page); }
    HeadView view(int layer, int head, int slot) const;
    HeadView index_view(int layer, int slot) const;  // of the keys of the layer's indexer

    // Copies whole blocks of a slot, from its block `first` on, out of the arena or into it. In the buffer a block has
    // the bytes of all layers, layer by layer. Throws std::invalid_argument for blocks that the slot does not hold.
    void copy_out(int slot, int64_t first, uint8_t* to, size_t size) const;
    void copy_in(int slot, int64_t first, const uint8_t* from, size_t size);
    size_t block_bytes() const { return bytes_per_block(layers_); }

    const std::vector<LayerLayout>& layers() const { return layers_; }
    KvType type() const { return type_; }
    size_t bytes() const { return arena_.size(); }
    const uint8_t* data() const { return arena_.data(); }

  private:
    int64_t check_blocks(int slot, int64_t first, size_t size) const;  // returns their number
    void use(int32_t block, std::vector<size_t>& pages);

    KvType type_;
    std::vector<LayerLayout> layers_;
    Arena arena_;
    std::vector<bool> used_pages_;
};

}  // namespace hpcdecode
