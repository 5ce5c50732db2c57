// The sequences of a call as kernels read them. They stay on the device from layer to layer.
#pragma once
#include <vector>

#include "block_table.h"
#include "device.h"
#include "kernel_api.h"

namespace hpcdecode {

class Batch {
  public:
    // Returns whether this is the batch of these slots and counts in a table of this version.
    bool holds(const int32_t* slots, const int32_t* counts, int n, uint64_t version, int group) const;
    void fill(const BlockTable& table, const int32_t* slots, const int32_t* counts, int n, uint64_t version, int group,
              Stream stream);
    void used(Stream stream) { last_use_.record(stream); }
    const BatchArgs& args() const { return args_; }

    // Returns the bytes of K and V that its sequences read at a layer.
    double bytes(const LayerArgs& layer, double token_bytes) const;

    uint64_t turn = 0;  // when it was used last

  private:
    std::vector<int32_t> slots_, counts_;
    std::vector<SequenceArgs> sequences_;
    uint64_t version_ = 0;
    int group_ = 0;
    Memory pinned_, device_;
    Event last_use_;
    BatchArgs args_{};
};

}  // namespace hpcdecode
