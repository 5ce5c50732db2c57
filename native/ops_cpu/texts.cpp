#include "texts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hpcdecode::ops {

namespace {

constexpr size_t kFirstChains = 256;             // a power of two
constexpr int kMostRuns = 32, kMostPlaces = 64;  // that a search looks at; places of other runs may share a chain

uint64_t coded(uint32_t text, size_t position) { return (static_cast<uint64_t>(text) << 32 | position) + 1; }

Place decoded(uint64_t code) { return {static_cast<uint32_t>((code - 1) >> 32), static_cast<uint32_t>(code - 1)}; }

const std::vector<int32_t> kNoTokens;

}  // namespace

Texts::Texts(int shortest) : shortest_(shortest), newest_(kFirstChains, 0) {
    if (shortest < 1) throw std::invalid_argument("runs: expected at least 1 token, got " + std::to_string(shortest));
}

uint32_t Texts::begin() {
    texts_.emplace_back();
    return oldest_ + static_cast<uint32_t>(texts_.size()) - 1;
}

void Texts::extend(uint32_t text, const int32_t* tokens, size_t count) {
    if (text < oldest_ || text - oldest_ >= texts_.size()) return;
    grow(count);
    Text& own = texts_[text - oldest_];
    for (size_t i = 0; i < count; ++i) {
        own.tokens.push_back(tokens[i]);
        own.previous.push_back(0);
        link(text, own.tokens.size() - 1);
    }
    count_ += count;
}

void Texts::drop_oldest() {
    count_ -= texts_.front().tokens.size();
    texts_.pop_front();
    ++oldest_;
}

const std::vector<int32_t>& Texts::tokens(uint32_t text) const {
    return text < oldest_ || text - oldest_ >= texts_.size() ? kNoTokens : texts_[text - oldest_].tokens;
}

Runs Texts::longest_runs(const std::vector<int32_t>& tokens, int longest, uint32_t but) const {
    Runs found;
    if (tokens.size() < shortest_) return found;
    int runs = 0;
    uint64_t code = newest_[slot(tokens.data() + tokens.size() - 1)];
    for (int places = 0; code != 0 && places < kMostPlaces && runs < kMostRuns; ++places) {
        const Place place = decoded(code);
        if (place.text < oldest_) break;
        const Text& text = texts_[place.text - oldest_];
        code = text.previous[place.position];
        if (place.text == but || place.position + 1 == text.tokens.size()) continue;
        const auto most =
            std::min({static_cast<size_t>(longest), static_cast<size_t>(place.position) + 1, tokens.size()});
        const int32_t *one = text.tokens.data() + place.position, *other = tokens.data() + tokens.size() - 1;
        size_t same = 0;
        while (same < most && *(one - same) == *(other - same)) ++same;
        if (same < shortest_) continue;
        ++runs;
        if (static_cast<int>(same) > found.length) found = {static_cast<int>(same), {}};
        if (static_cast<int>(same) == found.length) found.ends.push_back(place);
    }
    return found;
}

// Returns the chain of the `shortest_` tokens of which the last one is given.
size_t Texts::slot(const int32_t* last) const {
    uint64_t mixed = 0;
    for (size_t i = 0; i < shortest_; ++i) {
        mixed = (mixed ^ static_cast<uint32_t>(*(last - i))) * 0x9E3779B97F4A7C15u;
        mixed ^= mixed >> 32;
    }
    return mixed & (newest_.size() - 1);
}

void Texts::link(uint32_t number, size_t position) {
    if (position + 1 < shortest_) return;
    Text& text = texts_[number - oldest_];
    uint64_t& newest = newest_[slot(text.tokens.data() + position)];
    text.previous[position] = newest;
    newest = coded(number, position);
}

// Makes as many chains as there are tokens, so that places of different runs seldom share one.
void Texts::grow(size_t added) {
    if (count_ + added <= newest_.size()) return;
    size_t chains = newest_.size();
    while (chains < 2 * (count_ + added)) chains *= 2;
    newest_.assign(chains, 0);
    for (size_t i = 0; i < texts_.size(); ++i) {
        for (size_t position = 0; position < texts_[i].tokens.size(); ++position)
            link(oldest_ + static_cast<uint32_t>(i), position);
    }
}

}  // namespace hpcdecode::ops
