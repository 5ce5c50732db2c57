// Where the pages of a layer lie, in a KV cache that has room for some of them: its arena is cut into frames of one
// size, and a page, `range_blocks` consecutive blocks of one layer, lies in one of them or in none. Who moves pages
// says where they lie before each call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hpcdecode {

struct FrameOptions {
    int range_blocks = 0;  // of a page; 0: every block has a place of its own
    int frames = 0;
};

class PlacedPages {
  public:
    PlacedPages(const FrameOptions& options, int pages);

    bool framed() const { return options_.range_blocks > 0; }
    const FrameOptions& options() const { return options_; }
    int64_t blocks() const { return int64_t{options_.range_blocks} * options_.frames; }  // that memory has room for

    // Says in which frame each page of a layer lies, or -1. Throws std::invalid_argument for frames that are not there.
    void place(const int32_t* frames, int n);
    // Returns where a block lies, in units of a block's bytes, or -1.
    int32_t find(int32_t block) const;
    // Appends to `found` where blocks lie, and -1 for those before `first`. Throws std::logic_error if one of the
    // others lies in no frame.
    void find_all(const std::vector<int32_t>& blocks, size_t first, std::vector<int32_t>& found) const;

    // Returns the first block of every range, and the number of blocks: [ranges + 1].
    static std::vector<int64_t> bounds(int64_t blocks, int range_blocks);
    // Returns the bytes that blocks of every layer get, of which one needs most, so that few are whole pages of the
    // system.
    static size_t even_bytes(size_t most);

  private:
    FrameOptions options_;
    std::vector<int32_t> placed_;
};

}  // namespace hpcdecode
