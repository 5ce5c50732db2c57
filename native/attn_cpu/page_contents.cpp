#include "page_contents.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "crc32c.h"

namespace hpcdecode {
namespace {

constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
constexpr int64_t kGap = 256 << 10;  // bytes that are read along rather than left out

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

void check_positive(const char* name, int64_t value) {
    if (value >= 1) return;
    throw std::invalid_argument(std::string(name) + ": expected 1 at least, got " + std::to_string(value));
}

}  // namespace

int64_t PageMove::bytes() const {
    int64_t bytes = journal_end() - journal_begin();
    for (const auto& [begin, end] : runs) bytes += end - begin;
    return bytes;
}

std::vector<uint32_t> PageMove::sums_at(const uint8_t* page, size_t block_bytes) const {
    std::vector<const uint8_t*> data;
    for (const int32_t block : blocks) data.push_back(page + block * block_bytes);
    std::vector<uint32_t> found(data.size());
    crc32c_each(data.data(), block_bytes, static_cast<int>(data.size()), found.data());
    return found;
}

PageContents::PageContents(PageShape shape) : shape_(std::move(shape)) {
    check_positive("layers", shape_.layers);
    check_positive("ranges", shape_.ranges);
    check_positive("range_blocks", shape_.range_blocks);
    check_positive("block_tokens", shape_.block_tokens);
    check_positive("block_bytes", shape_.block_bytes);
    check_positive("alignment", shape_.alignment);
    if (static_cast<int>(shape_.row_bytes.size()) != shape_.layers)
        throw std::invalid_argument("row_bytes: expected " + std::to_string(shape_.layers) + " layers, got " +
                                    std::to_string(shape_.row_bytes.size()));
    together_ = static_cast<int>(shape_.alignment / std::gcd(shape_.alignment, shape_.block_bytes));
    if (shape_.range_blocks % together_ != 0)
        throw std::invalid_argument("range_blocks: expected a multiple of " + std::to_string(together_) + ", got " +
                                    std::to_string(shape_.range_blocks));
    const size_t pages = size_t(shape_.layers) * shape_.ranges;
    blocks_.assign(pages * shape_.range_blocks, Block{false, false, false, kNone, 0, 0, 0});
    journals_.resize(pages);
    has_.assign(pages, 0);
    live_.assign(size_t(shape_.ranges) * shape_.range_blocks, 0);
}

bool PageContents::set_live(const uint8_t* live) {
    bool any = false;
    for (int32_t range = 0; range < shape_.ranges; ++range) {
        const uint8_t* after = live + int64_t{range} * shape_.range_blocks;
        uint8_t* before = live_.data() + int64_t{range} * shape_.range_blocks;
        bool freed = false;
        for (int b = 0; b < shape_.range_blocks; ++b) {
            if (before[b] && !after[b]) {
                freed = true;
                for (int32_t layer = 0; layer < shape_.layers; ++layer) {
                    Block& block = blocks({layer, range})[b];
                    block = {false, false, false, kNone, 0, block.age + 1, block.sum};
                }
            }
            before[b] = after[b] != 0;
        }
        for (int32_t layer = 0; freed && layer < shape_.layers; ++layer) find_has({layer, range});
        any = any || freed;
    }
    return any;
}

bool PageContents::live(int range) const {
    const uint8_t* live = live_of(range);
    return std::any_of(live, live + shape_.range_blocks, [](uint8_t held) { return held != 0; });
}

void PageContents::changed(Block& block) const {
    block.dirty = block.whole = true;
    block.stored = false;
    block.first = kNone;
    block.end = 0;
    ++block.age;
}

void PageContents::wrote(int layer, const int32_t* blocks, int n) {
    int32_t range = -1;
    for (int i = 0; i < n; ++i) {
        const int32_t of = blocks[i] / shape_.range_blocks;
        if (range >= 0 && of != range) find_has({layer, range});
        range = of;
        changed(this->blocks({layer, of})[blocks[i] % shape_.range_blocks]);
    }
    if (range >= 0) find_has({layer, range});
}

void PageContents::grew(int layer, const int32_t* blocks, const int32_t* tokens, int n) {
    for (int i = 0; i < n; ++i) {
        const Page page{layer, blocks[i] / shape_.range_blocks};
        Block& block = this->blocks(page)[blocks[i] % shape_.range_blocks];
        if (block.dirty) continue;
        if (block.stored || block.end > 0 || tokens[i] == 0) {
            block.first = std::min(block.first, tokens[i]);
            block.end = std::max(block.end, tokens[i] + 1);
        } else {
            changed(block);
            find_has(page);
        }
    }
}

void PageContents::find_has(Page page) {
    const Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    bool found = false;
    for (int b = 0; b < shape_.range_blocks && !found; ++b) found = block[b].stored && live[b];
    has_[index(page)] = found;
}

bool PageContents::unsaved(Page page) const {
    const Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    for (int b = 0; b < shape_.range_blocks; ++b)
        if (live[b] && (block[b].dirty || block[b].end > 0)) return true;
    return false;
}

// Returns the journal of a page without items of blocks that were freed or written as a whole since.
PageContents::Journal& PageContents::journal(Page page) {
    Journal& j = journals_[index(page)];
    const Block* block = blocks(page);
    size_t kept = 0;
    for (size_t i = 0; i < j.items.size(); ++i) {
        if (block[j.items[i].block].age != j.ages[i]) continue;
        j.items[kept] = j.items[i];
        j.ages[kept++] = j.ages[i];
    }
    j.items.resize(kept);
    j.ages.resize(kept);
    if (kept == 0) j.records.clear();
    return j;
}

// Has blocks written as a whole that their sequences have filled.
void PageContents::write_filled(Page page) {
    Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    for (int b = 0; b < shape_.range_blocks; ++b)
        if (live[b] && block[b].end >= shape_.block_tokens) changed(block[b]);
}

// Has blocks written as a whole that grew since they were written, and that writing others would write a part of.
void PageContents::write_beside(Page page) {
    if (together_ == 1) return;
    Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    std::vector<uint8_t> grew(shape_.range_blocks);
    for (int b = 0; b < shape_.range_blocks; ++b) grew[b] = block[b].end > 0;
    for (const TokenItem& item : journal(page).items) grew[item.block] = 1;
    for (int at = 0; at < shape_.range_blocks; at += together_) {
        bool written = false;
        for (int b = at; b < at + together_; ++b) written = written || (block[b].dirty && live[b]);
        for (int b = at; written && b < at + together_; ++b)
            if (grew[b] && block[b].whole && live[b]) changed(block[b]);
    }
}

// Has all blocks written as a whole that are in the journal, or would be.
void PageContents::write_journal(Page page) {
    Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    Journal& j = journal(page);
    for (const TokenItem& item : j.items)
        if (live[item.block]) changed(block[item.block]);
    for (int b = 0; b < shape_.range_blocks; ++b)
        if (live[b] && block[b].end > 0) changed(block[b]);
    j = {};
}

// Fills in the tokens that tiers lack of blocks that grew, behind the page's journal.
void PageContents::record(Page page, PageMove& move) {
    const Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    const Journal& j = journal(page);
    const int64_t begin = j.records.empty() ? 0 : j.records.back().at + j.records.back().bytes;
    int64_t at = begin;
    for (int b = 0; b < shape_.range_blocks; ++b) {
        if (!live[b] || block[b].end == 0) continue;
        const int32_t count = block[b].end - block[b].first;
        move.items.push_back({b, block[b].first, count, static_cast<int32_t>(at)});
        move.ages.push_back(block[b].age);
        at += count * shape_.row_bytes[page.layer];
    }
    if (at > begin) move.records = {{begin, round_up(at - begin, shape_.alignment), 0}};
}

void PageContents::begin_writing(Page page, PageMove& move) {
    write_filled(page);
    write_beside(page);
    record(page, move);
    if (move.journal_end() > shape_.journal_bytes) {
        write_journal(page);
        move.records.clear();
        move.items.clear();
        move.ages.clear();
    }
    const Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    for (int b = 0; b < shape_.range_blocks; ++b)
        if (block[b].dirty && live[b]) move.blocks.push_back(b);
    move.sums.assign(move.blocks.size(), 0);
    find_runs(move);
    find_has(page);
}

void PageContents::was_written(const PageMove& move) {
    Block* block = blocks(move.page);
    for (size_t i = 0; i < move.blocks.size(); ++i) {
        Block& b = block[move.blocks[i]];
        if (!b.dirty) continue;  // it was freed meanwhile
        b.sum = move.sums[i];
        b.stored = b.whole = true;
        b.dirty = false;
    }
    if (!move.records.empty()) {
        Journal& j = journal(move.page);
        for (size_t i = 0; i < move.items.size(); ++i) {
            Block& b = block[move.items[i].block];
            j.items.push_back(move.items[i]);
            j.ages.push_back(move.ages[i]);
            if (b.age != move.ages[i]) continue;
            b.stored = true;
            b.first = kNone;
            b.end = 0;
        }
        j.records.push_back(move.records.front());
    }
    find_has(move.page);
}

void PageContents::begin_reading(Page page, PageMove& move) {
    const Block* block = blocks(page);
    const uint8_t* live = live_of(page.range);
    for (int b = 0; b < shape_.range_blocks; ++b) {
        if (!block[b].stored || !block[b].whole || !live[b]) continue;
        move.blocks.push_back(b);
        move.sums.push_back(block[b].sum);
    }
    find_runs(move);
    const Journal& j = journal(page);
    move.records = j.records;
    move.items = j.items;
}

// Finds what moves as a whole. What lies between two blocks that are read is read along if it is little.
void PageContents::find_runs(PageMove& move) const {
    for (const int64_t block : move.blocks) {
        const int64_t begin = block * shape_.block_bytes / shape_.alignment * shape_.alignment;
        const int64_t end = round_up((block + 1) * shape_.block_bytes, shape_.alignment);
        if (!move.runs.empty() && begin - move.runs.back().second <= (move.writes ? 0 : kGap))
            move.runs.back().second = end;
        else
            move.runs.push_back({begin, end});
    }
}

int64_t PageContents::lost(const uint8_t* held) const {
    int64_t lost = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        const Block& block = blocks_[i];
        const bool only_here = block.dirty || block.end > 0;
        lost += (only_here && !held[i / shape_.range_blocks]) + (block.dirty && block.stored);
    }
    return lost;
}

}  // namespace hpcdecode
