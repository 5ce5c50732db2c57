#include "placed_pages.h"

#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

constexpr size_t kUnit = 512;  // bytes

}  // namespace

PlacedPages::PlacedPages(const FrameOptions& options, int pages) : options_(options) {
    if (framed()) placed_.assign(pages, -1);
}

void PlacedPages::place(const int32_t* frames, int n) {
    if (n != static_cast<int>(placed_.size()))
        throw std::invalid_argument("frames: expected those of " + std::to_string(placed_.size()) + " pages, got " +
                                    std::to_string(n));
    for (int i = 0; i < n; ++i) {
        if (frames[i] < -1 || frames[i] >= options_.frames)
            throw std::invalid_argument("frames: expected -1 to " + std::to_string(options_.frames - 1) + ", got " +
                                        std::to_string(frames[i]));
    }
    placed_.assign(frames, frames + n);
}

int32_t PlacedPages::find(int32_t block) const {
    const int32_t frame = placed_[block / options_.range_blocks];
    return frame < 0 ? -1 : frame * options_.range_blocks + block % options_.range_blocks;
}

void PlacedPages::find_all(const std::vector<int32_t>& blocks, size_t first, std::vector<int32_t>& found) const {
    const size_t begin = found.size();
    found.resize(begin + blocks.size(), -1);
    for (size_t b = first; b < blocks.size(); ++b) {
        found[begin + b] = find(blocks[b]);
        if (found[begin + b] < 0) throw std::logic_error("block " + std::to_string(blocks[b]) + " lies in no frame");
    }
}

std::vector<int64_t> PlacedPages::bounds(int64_t blocks, int range_blocks) {
    std::vector<int64_t> bounds;
    for (int64_t b = 0; b < blocks + range_blocks; b += range_blocks) bounds.push_back(b);
    return bounds;
}

size_t PlacedPages::even_bytes(size_t most) { return (most + kUnit - 1) / kUnit * kUnit; }

}  // namespace hpcdecode
