// Which pages of a KV cache lie in frames of memory, and which of them move next.
//
// Layers attend in turn, step after step, so that the page used last is needed last: it goes first, and the one whose
// use is longest ago comes in next. So a part of the pages stays in memory, and only the rest moves.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "page_contents.h"

namespace hpcdecode {

// Decides; what it returns to be moved others move, and say so. Its methods exclude each other by the caller's care.
// Marks are uint8 [ranges], 1 or 0.
class PageTable {
  public:
    using Moves = std::vector<std::shared_ptr<PageMove>>;

    // frames: Pages that memory has room for.
    // window: Pages that come in ahead of their use.
    PageTable(PageShape shape, int frames, int window);

    const PageShape& shape() const { return contents_.shape(); }

    // Says which blocks sequences hold: [ranges * range_blocks]; what others held is forgotten.
    void set_live(const uint8_t* live, int64_t size);
    // Has pages of a layer come in, and stay until `unpin`.
    Moves pin(int layer, const uint8_t* parts, int64_t size);
    // Lets pages of a layer go, which are needed again when all others have been.
    Moves unpin(int layer, const uint8_t* parts, int64_t size);
    // Begins to move what should move next.
    Moves pump();
    // Marks the rows that have all their pages, of which each needs some of a layer: [n, ranges]. Returns their number.
    int find_able(int layer, const uint8_t* needs, int64_t size, uint8_t* able, int64_t rows) const;
    // Returns the frame of every page of a layer, or -1.
    const std::vector<int32_t>& frames(int layer);
    // Notes that blocks of pinned pages were written, or grew by one token each.
    void wrote(int layer, const int32_t* blocks, int n);
    void grew(int layer, const int32_t* blocks, const int32_t* tokens, int n);
    // Notes that a move has come to its end.
    void was_moved(const PageMove& move);

    // Returns what does not hold of: every frame is free or has one page, every block is somewhere. Empty if all does.
    std::string broken() const;
    bool any_pinned() const;

  private:
    enum State : uint8_t { kAbsent, kReading, kResident, kWriting };
    struct Entry {
        int64_t used_at;
        int32_t frame;
        State state;
        bool pinned, ahead;  // ahead: came in, or comes, and was not used yet
    };

    Page page(int64_t i) const { return {static_cast<int32_t>(i / ranges_), static_cast<int32_t>(i % ranges_)}; }
    Entry* entries(int layer, int64_t size, int64_t expected);
    void check_layer(int layer) const;
    void check_blocks(const int32_t* blocks, int n) const;
    int64_t next() const;
    bool make_room(int64_t i, Moves& moves);
    int64_t latest(int64_t i) const;
    void drop(int64_t i);

    PageContents contents_;
    int ranges_, window_, frame_count_;
    std::vector<Entry> entries_;  // [layers, ranges]
    std::vector<int32_t> free_, placed_;
    int64_t clock_ = 0;
    int reading_ = 0, writing_ = 0;
};

}  // namespace hpcdecode
