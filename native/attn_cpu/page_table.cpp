#include "page_table.h"

#include <algorithm>
#include <stdexcept>

namespace hpcdecode {
namespace {

void check_size(const char* name, int64_t size, int64_t expected) {
    if (size == expected) return;
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(expected) + " bytes, got " +
                                std::to_string(size));
}

}  // namespace

PageTable::PageTable(PageShape shape, int frames, int window)
    : contents_(std::move(shape)), ranges_(contents_.shape().ranges), window_(window), frame_count_(frames) {
    if (frames < 1 || window < 1)
        throw std::invalid_argument("frames and window: expected 1 at least, got " + std::to_string(frames) + " and " +
                                    std::to_string(window));
    entries_.assign(size_t(contents_.shape().layers) * ranges_, Entry{0, -1, kAbsent, false, false});
    for (int32_t frame = frames; frame-- > 0;) free_.push_back(frame);
}

void PageTable::set_live(const uint8_t* live, int64_t size) {
    check_size("live", size, int64_t{ranges_} * shape().range_blocks);
    if (!contents_.set_live(live)) return;
    std::vector<uint8_t> held(ranges_);
    for (int r = 0; r < ranges_; ++r) held[r] = contents_.live(r);
    for (size_t i = 0; i < entries_.size(); ++i)
        if (entries_[i].state == kResident && !entries_[i].pinned && !held[i % ranges_]) drop(i);
}

PageTable::Moves PageTable::pin(int layer, const uint8_t* parts, int64_t size) {
    Entry* e = entries(layer, size, ranges_);
    for (int r = 0; r < ranges_; ++r) {
        if (!parts[r]) continue;
        e[r].pinned = true;
        e[r].ahead = false;
    }
    return pump();
}

PageTable::Moves PageTable::unpin(int layer, const uint8_t* parts, int64_t size) {
    Entry* e = entries(layer, size, ranges_);
    ++clock_;
    for (int r = 0; r < ranges_; ++r) {
        if (!parts[r]) continue;
        e[r].used_at = clock_;
        e[r].pinned = false;
    }
    return pump();
}

PageTable::Moves PageTable::pump() {
    Moves moves;
    for (int64_t i = next(); i >= 0; i = next()) {
        if (free_.empty() && !make_room(i, moves)) break;
        Entry& e = entries_[i];
        e.frame = free_.back();
        free_.pop_back();
        if (!contents_.has(i)) {  // all its blocks are new
            e.state = kResident;
            continue;
        }
        e.state = kReading;
        e.ahead = !e.pinned;
        ++reading_;
        moves.push_back(std::make_shared<PageMove>(PageMove{false, page(i), e.frame, {}, {}, {}, {}, {}, {}}));
        contents_.begin_reading(page(i), *moves.back());
    }
    return moves;
}

int PageTable::find_able(int layer, const uint8_t* needs, int64_t size, uint8_t* able, int64_t rows) const {
    check_layer(layer);
    check_size("needs", size, rows * ranges_);
    const Entry* e = entries_.data() + int64_t{layer} * ranges_;
    int found = 0;
    for (int64_t row = 0; row < rows; ++row, needs += ranges_) {
        bool all = true;
        for (int r = 0; r < ranges_ && all; ++r) all = !needs[r] || e[r].state == kResident;
        able[row] = all;
        found += all;
    }
    return found;
}

const std::vector<int32_t>& PageTable::frames(int layer) {
    check_layer(layer);
    placed_.resize(ranges_);
    const Entry* e = entries_.data() + int64_t{layer} * ranges_;
    for (int r = 0; r < ranges_; ++r) placed_[r] = e[r].state == kResident ? e[r].frame : -1;
    return placed_;
}

void PageTable::wrote(int layer, const int32_t* blocks, int n) {
    check_layer(layer);
    check_blocks(blocks, n);
    contents_.wrote(layer, blocks, n);
}

void PageTable::grew(int layer, const int32_t* blocks, const int32_t* tokens, int n) {
    check_layer(layer);
    check_blocks(blocks, n);
    contents_.grew(layer, blocks, tokens, n);
}

void PageTable::was_moved(const PageMove& move) {
    const int64_t i = int64_t{move.page.layer} * ranges_ + move.page.range;
    Entry& e = entries_[i];
    if (e.state != (move.writes ? kWriting : kReading)) throw std::logic_error("expected the end of a move that began");
    --(move.writes ? writing_ : reading_);
    e.state = kResident;
    if (move.writes) contents_.was_written(move);
    if (!e.pinned && (move.writes || !contents_.live(move.page.range))) drop(i);
}

std::string PageTable::broken() const {
    std::vector<int32_t> frames = free_;
    std::vector<uint8_t> held(entries_.size());
    for (size_t i = 0; i < entries_.size(); ++i) {
        if (entries_[i].frame >= 0) frames.push_back(entries_[i].frame);
        held[i] = entries_[i].state == kResident || entries_[i].state == kWriting;
    }
    std::sort(frames.begin(), frames.end());
    bool once = static_cast<int>(frames.size()) == frame_count_;
    for (int f = 0; once && f < frame_count_; ++f) once = frames[f] == f;
    if (!once)
        return "frames are free or have one page: " + std::to_string(frames.size() - free_.size()) + " hold pages, " +
               std::to_string(free_.size()) + " are free of " + std::to_string(frame_count_);
    if (const int64_t lost = contents_.lost(held.data()))
        return "blocks lie in memory or in a tier: " + std::to_string(lost) + " lie in neither, or in both";
    return "";
}

bool PageTable::any_pinned() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const Entry& e) { return e.pinned; });
}

PageTable::Entry* PageTable::entries(int layer, int64_t size, int64_t expected) {
    check_layer(layer);
    check_size("parts", size, expected);
    return entries_.data() + int64_t{layer} * ranges_;
}

void PageTable::check_layer(int layer) const {
    if (layer < 0 || layer >= shape().layers)
        throw std::invalid_argument("layer: expected 0 to " + std::to_string(shape().layers - 1) + ", got " +
                                    std::to_string(layer));
}

void PageTable::check_blocks(const int32_t* blocks, int n) const {
    const int32_t count = ranges_ * shape().range_blocks;
    for (int i = 0; i < n; ++i)
        if (blocks[i] < 0 || blocks[i] >= count)
            throw std::invalid_argument("blocks: expected 0 to " + std::to_string(count - 1) + ", got " +
                                        std::to_string(blocks[i]));
}

// Returns the page that comes in next, or -1: one that is needed, those with nothing to read first, else the one whose
// use is longest ago.
int64_t PageTable::next() const {
    int64_t needed = -1, due = -1;
    int ahead = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(entries_.size()); ++i) {
        const Entry& e = entries_[i];
        ahead += e.ahead;
        if (e.state != kAbsent) continue;
        const bool has = contents_.has(i);
        if (e.pinned && !has) return i;
        if (e.pinned && needed < 0) needed = i;
        if (has && (due < 0 || e.used_at < entries_[due].used_at)) due = i;
    }
    if (needed >= 0) return reading_ < window_ ? needed : -1;
    return ahead < window_ ? due : -1;
}

// Frees a frame for a page, by dropping another that is needed later. Returns false if one has to be written first.
bool PageTable::make_room(int64_t i, Moves& moves) {
    for (int64_t last = latest(i); last >= 0; last = latest(i)) {
        if (!contents_.unsaved(page(last))) {
            drop(last);
            return true;
        }
        if (writing_ >= window_) return false;
        Entry& e = entries_[last];
        e.state = kWriting;
        ++writing_;
        moves.push_back(std::make_shared<PageMove>(PageMove{true, page(last), e.frame, {}, {}, {}, {}, {}, {}}));
        contents_.begin_writing(page(last), *moves.back());
        if (writing_ >= std::max(window_ / 2, 1)) return false;
    }
    return false;
}

// Returns the page in memory that is needed last of those that may give way to another, or -1.
int64_t PageTable::latest(int64_t i) const {
    const Entry& other = entries_[i];
    int64_t last = -1;
    for (int64_t j = 0; j < static_cast<int64_t>(entries_.size()); ++j) {
        const Entry& e = entries_[j];
        if (e.state != kResident || e.pinned) continue;
        if (!other.pinned && (e.ahead || e.used_at <= other.used_at)) continue;
        if (last < 0 || e.used_at > entries_[last].used_at) last = j;
    }
    return last;
}

void PageTable::drop(int64_t i) {
    Entry& e = entries_[i];
    free_.push_back(e.frame);
    e.frame = -1;
    e.state = kAbsent;
    e.ahead = false;
}

}  // namespace hpcdecode
