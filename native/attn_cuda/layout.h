// How K and V of a token lie in the blocks of a KV cache on a device.
#pragma once
#include <cstddef>
#include <vector>

#include "kernel_api.h"
#include "layer_groups.h"
#include "shape.h"

namespace hpcdecode {

// Return the layers' layouts, and the bytes of a block over all of them. Throw std::invalid_argument for shapes or
// types without kernels.
std::vector<LayerArgs> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens);
size_t bytes_per_block(const std::vector<LayerArgs>& layers);
LayerGroups group_layers(const std::vector<LayerShape>& shapes, const std::vector<LayerArgs>& layers);

}  // namespace hpcdecode
