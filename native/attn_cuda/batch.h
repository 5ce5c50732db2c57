// The sequences of a call as kernels read them. They stay on the device from layer to layer.
#pragma once
#include <vector>

#include "block_table.h"
#include "device.h"
#include "kernel_api.h"
#include "placed_pages.h"

namespace hpcdecode {

// How the work of a call is cut into items; without rows there are none.
struct Cut {
    int group;        // query heads of a KV head
    int rows, piece;  // query rows and tokens of an item
    int layers = 0;   // group of layers whose blocks are reached

    bool operator==(const Cut& o) const {
        return group == o.group && rows == o.rows && piece == o.piece && layers == o.layers;
    }
};

class Batch {
  public:
    // Returns whether this is the batch of these slots and counts in a table of this version.
    bool holds(const int32_t* slots, const int32_t* counts, int n, uint64_t version, const Cut& cut) const;
    // Its blocks are those that calls with this cut reach: without rows those that are written, else all.
    void fill(const BlockTable& table, const PlacedPages& placed, const int32_t* slots, const int32_t* counts, int n,
              uint64_t version, const Cut& cut, Stream stream);
    void used(Stream stream) { last_use_.record(stream); }
    const BatchArgs& args() const { return args_; }
    bool in_pieces() const { return longest_ > cut_.piece; }  // whether a sequence has more than one

    // Returns the bytes of K and V that its sequences read at a layer.
    double bytes(const LayerArgs& layer, double token_bytes) const;

    uint64_t turn = 0;  // when it was used last

  private:
    std::vector<int32_t> slots_, counts_;
    std::vector<SequenceArgs> sequences_;
    uint64_t version_ = 0;
    Cut cut_{};
    int longest_ = 0;
    Memory pinned_, device_;
    Event last_use_;
    BatchArgs args_{};
};

}  // namespace hpcdecode
