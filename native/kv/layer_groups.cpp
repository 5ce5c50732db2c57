#include "layer_groups.h"

#include <algorithm>

namespace hpcdecode {
namespace {

using Kinds = std::vector<std::vector<size_t>>;

Window kept_by(const LayerShape& shape) { return shape.has_entries() ? Window{} : shape.window; }
bool same(const Window& a, const Window& b) { return a.size == b.size && a.chunked == b.chunked; }

// Returns the layers of each window, in order.
Kinds by_window(const std::vector<LayerShape>& layers) {
    Kinds found;
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto at = std::find_if(found.begin(), found.end(), [&](const auto& others) {
            return same(kept_by(layers[i]), kept_by(layers[others.front()]));
        });
        (at == found.end() ? found.emplace_back() : *at).push_back(i);
    }
    return found;
}

LayerGroups fill(const std::vector<LayerShape>& layers, const std::vector<int64_t>& bytes, const Kinds& kinds,
                 int64_t block_bytes) {
    LayerGroups groups{{}, std::vector<int>(layers.size()), std::vector<int64_t>(layers.size()), block_bytes};
    for (const auto& kind : kinds) {
        int64_t room = 0;
        for (const size_t i : kind) {
            if (bytes[i] > room) {
                groups.windows.push_back(kept_by(layers[i]));
                room = block_bytes;
            }
            groups.group[i] = static_cast<int>(groups.windows.size()) - 1;
            groups.offsets[i] = block_bytes - room;
            room -= bytes[i];
        }
    }
    return groups;
}

}  // namespace

LayerGroups group_layers(const std::vector<LayerShape>& layers, const std::vector<int64_t>& bytes) {
    const Kinds kinds = by_window(layers);
    const int64_t least = *std::max_element(bytes.begin(), bytes.end());
    std::vector<int64_t> sizes;
    for (const auto& kind : kinds) {
        int64_t size = 0;
        for (const size_t i : kind) sizes.push_back(std::max(size += bytes[i], least));
    }
    std::sort(sizes.rbegin(), sizes.rend());
    const auto total = [&](int64_t size) {
        return size * static_cast<int64_t>(fill(layers, bytes, kinds, size).windows.size());
    };
    const int64_t best =
        *std::min_element(sizes.begin(), sizes.end(), [&](int64_t a, int64_t b) { return total(a) < total(b); });
    return fill(layers, bytes, kinds, best);
}

std::vector<std::pair<int64_t, bool>> windows_of(const LayerGroups& groups) {
    std::vector<std::pair<int64_t, bool>> windows;
    for (const Window& w : groups.windows) windows.emplace_back(w.size, w.chunked);
    return windows;
}

LayerGroups all_together(size_t layers) {
    return {{Window{}}, std::vector<int>(layers, 0), std::vector<int64_t>(layers, 0), 0};
}

}  // namespace hpcdecode
