// What a tier has of every page of a KV cache with frames, and what of it is in memory alone.
//
// Most of what changes are single tokens at the ends of sequences. They go to the journal of their page, which lies
// behind its blocks in the tier, as records of tokens. A block is written as a whole if its sequence has filled it, if
// more than single tokens changed, and if a journal is full. So every token is written about twice, however often its
// page moves.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hpcdecode {

// A page has the blocks of one range at one layer.
struct PageShape {
    int layers, ranges, range_blocks, block_tokens;
    int64_t block_bytes, journal_bytes;
    int64_t alignment;               // of what tiers read and write, in bytes
    std::vector<int64_t> row_bytes;  // of a token, by layer
};

struct Page {
    int32_t layer, range;
};

// Tokens of a block of a page, and the byte of the page's journal at which they begin.
struct TokenItem {
    int32_t block, first, count, at;
};

// What was written to a journal at once: bytes that tiers can read and write.
struct JournalRecord {
    int64_t at, bytes;
    uint32_t checksum;
};

// What moves of a page, in or out.
struct PageMove {
    bool writes;
    Page page;
    int32_t frame;
    std::vector<int32_t> blocks;                    // that move as a whole, ascending
    std::vector<uint32_t> sums;                     // of these: expected of what is read, taken of what is written
    std::vector<JournalRecord> records;             // all of the journal, or what is written behind it
    std::vector<TokenItem> items;                   // tokens in it
    std::vector<int32_t> ages;                      // of their blocks, if they are written
    std::vector<std::pair<int64_t, int64_t>> runs;  // begin and end of what moves of the page's blocks, in bytes

    int64_t journal_begin() const { return records.empty() ? 0 : records.front().at; }
    int64_t journal_end() const { return records.empty() ? 0 : records.back().at + records.back().bytes; }
    int64_t bytes() const;
    // Returns the checksums of the blocks that move as a whole, of a page that lies at `page`.
    std::vector<uint32_t> sums_at(const uint8_t* page, size_t block_bytes) const;
};

class PageContents {
  public:
    explicit PageContents(PageShape shape);

    const PageShape& shape() const { return shape_; }

    // Says which blocks sequences hold: [ranges * range_blocks]. What those held that became free is forgotten. Returns
    // whether there are any.
    bool set_live(const uint8_t* live);
    bool live(int range) const;  // whether sequences hold any of its blocks

    // Notes that blocks changed, whatever of them, or by one token each.
    void wrote(int layer, const int32_t* blocks, int n);
    void grew(int layer, const int32_t* blocks, const int32_t* tokens, int n);

    bool has(int64_t page) const { return has_[page] != 0; }  // whether tiers have what sequences hold; by index
    bool unsaved(Page page) const;                            // whether memory alone has some of that

    // Fills in what goes out of a page. Nothing of the page changes until `was_written`, but blocks may become free.
    void begin_writing(Page page, PageMove& move);
    void was_written(const PageMove& move);
    void begin_reading(Page page, PageMove& move);

    // Returns how many blocks are neither in tiers nor in memory as a whole, or seem to be in both.
    // held: [layers * ranges], pages that lie in memory.
    int64_t lost(const uint8_t* held) const;

  private:
    struct Block {
        bool dirty, stored, whole;  // differs from what tiers have; tiers have it; and not in the journal alone
        int32_t first, end;         // tokens that tiers lack besides; none if end is 0
        int32_t age;                // counts how often items of journals became void
        uint32_t sum;
    };
    struct Journal {
        std::vector<JournalRecord> records;
        std::vector<TokenItem> items;
        std::vector<int32_t> ages;
    };

    int64_t index(Page page) const { return int64_t{page.layer} * shape_.ranges + page.range; }
    Block* blocks(Page page) { return blocks_.data() + index(page) * shape_.range_blocks; }
    const Block* blocks(Page page) const { return blocks_.data() + index(page) * shape_.range_blocks; }
    const uint8_t* live_of(int range) const { return live_.data() + int64_t{range} * shape_.range_blocks; }
    void changed(Block& block) const;
    void find_has(Page page);
    Journal& journal(Page page);
    void write_filled(Page page);
    void write_beside(Page page);
    void write_journal(Page page);
    void record(Page page, PageMove& move);
    void find_runs(PageMove& move) const;

    PageShape shape_;
    int together_;                   // blocks that begin and end where tiers can begin and end to write
    std::vector<Block> blocks_;      // [layers, ranges, range_blocks]
    std::vector<Journal> journals_;  // [layers, ranges]
    std::vector<uint8_t> has_;       // [layers, ranges]
    std::vector<uint8_t> live_;      // [ranges, range_blocks]
};

}  // namespace hpcdecode
