// Groups of layers that share the blocks of a KV cache which gives up what leaves windows.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "shape.h"

namespace hpcdecode {

// All blocks have as many bytes, so that any group can take any block.
struct LayerGroups {
    std::vector<Window> windows;   // of each group: none if it keeps all tokens
    std::vector<int> group;        // of each layer
    std::vector<int64_t> offsets;  // of each layer in a block of its group
    int64_t block_bytes;

    bool dropping() const { return windows.size() > 1 || windows.front(); }
};

// Puts layers with equal windows in groups. Layers with compressed entries keep all tokens, as these lie among them. Of
// sizes of blocks that waste equally little the largest counts. bytes: Of a block of each layer.
LayerGroups group_layers(const std::vector<LayerShape>& layers, const std::vector<int64_t>& bytes);

// Returns the window of each group, 0 for none, and whether it is chunked.
std::vector<std::pair<int64_t, bool>> windows_of(const LayerGroups& groups);

// Returns one group of layers that keep all tokens, each of which has blocks of its own.
LayerGroups all_together(size_t layers);

}  // namespace hpcdecode
