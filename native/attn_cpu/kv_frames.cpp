// What a KV cache with frames tells its owner, who moves pages.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "crc32c.h"
#include "kv_cache.h"

namespace hpcdecode {
namespace {

static_assert(sizeof(TokenItem) == 4 * sizeof(int32_t), "items are four numbers");

void check_journal(const PageMove& move, int64_t size) {
    if (move.journal_end() <= size) return;
    throw std::invalid_argument("journal: expected " + std::to_string(move.journal_end()) + " bytes, got " +
                                std::to_string(size));
}

}  // namespace

void KvCache::place_pages(const int32_t* frames, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.place_pages(frames, n);
}

void KvCache::copy_block(int32_t from, int32_t to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::min(from, to) < 0 || std::max(from, to) >= pool_.block_count())
        throw std::invalid_argument("expected blocks 0 to " + std::to_string(pool_.block_count() - 1) + ", got " +
                                    std::to_string(from) + " and " + std::to_string(to));
    pool_.copy_block(from, to);
}

std::vector<BlockTable::Copy> KvCache::take_copies() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pool_.take_copies();
}

void KvCache::mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.mark_ranges(slots, counts, n, all, marks, size);
}

std::vector<int32_t> KvCache::written_blocks(const int32_t* slots, const int32_t* counts, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pool_.written_blocks(slots, counts, n);
}

void KvCache::mark_used(uint8_t* marks, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.mark_used(marks, size);
}

size_t KvCache::row_bytes(int layer) const {
    if (layer < 0 || layer >= static_cast<int>(pool_.layers().size()))
        throw std::invalid_argument("layer: expected 0 to " + std::to_string(pool_.layers().size() - 1) + ", got " +
                                    std::to_string(layer));
    const LayerLayout& l = pool_.layers()[layer];
    return l.head.row_bytes * l.shape.kv_heads;
}

void KvCache::move_tokens(MoveTokens move, int layer, int frame, const int32_t* items, int n, uint8_t* rows,
                          int64_t size) const {
    const size_t row = row_bytes(layer);
    const LayerLayout& l = pool_.layers()[layer];
    const FrameOptions& frames = pool_.frames();
    if (frame < 0 || frame >= frames.frames)
        throw std::invalid_argument("frame: expected 0 to " + std::to_string(frames.frames - 1) + ", got " +
                                    std::to_string(frame));
    for (const int32_t* item = items; item < items + 4 * n; item += 4) {
        const int32_t block = item[0], first = item[1], count = item[2];
        if (block < 0 || block >= frames.range_blocks || first < 0 || count < 0 || first > pool_.block_tokens() - count)
            throw std::invalid_argument("items: expected tokens of a page, got " + std::to_string(count) + " from " +
                                        std::to_string(first) + " on in block " + std::to_string(block));
        if (item[3] < 0 || item[3] + static_cast<int64_t>(count * row) > size)
            throw std::invalid_argument("rows: expected " + std::to_string(count * row) + " bytes from " +
                                        std::to_string(item[3]) + " on, got " + std::to_string(size) + " in all");
    }
    uint8_t* page = const_cast<uint8_t*>(pool_.data()) + frame * pool_.frame_bytes();
    for (const int32_t* item = items; item < items + 4 * n; item += 4) {
        uint8_t* block = page + item[0] * l.block_bytes;
        for (int head = 0; head < l.shape.kv_heads; ++head) {
            move({&l.head, block + head * l.head.head_bytes, item[1], item[2], rows + item[3] + head * l.head.row_bytes,
                  static_cast<int64_t>(row)});
        }
    }
}

void KvCache::save_tokens(int layer, int frame, const int32_t* items, int n, uint8_t* rows, int64_t size) const {
    move_tokens(table_.save[static_cast<int>(pool_.type())], layer, frame, items, n, rows, size);
}

void KvCache::restore_tokens(int layer, int frame, const int32_t* items, int n, uint8_t* rows, int64_t size) {
    move_tokens(table_.restore[static_cast<int>(pool_.type())], layer, frame, items, n, rows, size);
}

std::vector<uint32_t> KvCache::sums_of(const PageMove& move) const {
    return move.sums_at(pool_.data() + move.frame * pool_.frame_bytes(), pool_.layers()[move.page.layer].block_bytes);
}

void KvCache::seal(PageMove& move, uint8_t* journal, int64_t size) const {
    check_journal(move, size);
    move.sums = sums_of(move);
    if (move.items.empty()) return;
    save_tokens(move.page.layer, move.frame, &move.items.data()->block, static_cast<int>(move.items.size()), journal,
                size);
    for (JournalRecord& record : move.records) record.checksum = crc32c(journal + record.at, record.bytes);
}

bool KvCache::unseal(const PageMove& move, uint8_t* journal, int64_t size) {
    check_journal(move, size);
    if (sums_of(move) != move.sums) return false;
    for (const JournalRecord& record : move.records)
        if (crc32c(journal + record.at, record.bytes) != record.checksum) return false;
    if (!move.items.empty())
        restore_tokens(move.page.layer, move.frame, &move.items.data()->block, static_cast<int>(move.items.size()),
                       journal, size);
    return true;
}

}  // namespace hpcdecode
