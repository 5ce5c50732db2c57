// Finds runs of tokens in random texts, and drafts after them, for the sanitizers to watch, against plain searches. A
// failed check prints where and what, and the exit status is 1.
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "drafter.h"

using namespace hpcdecode::ops;

namespace {

std::mt19937 random_bits(7);

int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_bits); }

std::vector<int32_t> tokens(int count, int vocabulary) {
    std::vector<int32_t> made(count);
    for (int32_t& token : made) token = below(vocabulary);
    return made;
}

// The length of the run that ends at `end` of one text and at the end of another.
int same(const std::vector<int32_t>& text, int end, const std::vector<int32_t>& last, int longest) {
    int count = 0;
    while (count < longest && count <= end && count < static_cast<int>(last.size()) &&
           text[end - count] == last[last.size() - 1 - count])
        ++count;
    return count;
}

// Few tokens, so that all places are looked at: 32 of them.
void test_runs(int shortest, int longest, int texts, int dropped) {
    Texts all(shortest);
    std::vector<std::vector<int32_t>> plain(texts);
    for (auto& text : plain) {
        const uint32_t number = all.begin();
        while (below(3)) {
            const auto more = tokens(below(4), 5);
            all.extend(number, more.data(), more.size());
            text.insert(text.end(), more.begin(), more.end());
        }
    }
    for (int i = 0; i < dropped; ++i) all.drop_oldest();
    const auto last = tokens(below(6), 5);
    const uint32_t but = below(texts + 1);
    int best = 0, ends = 0;
    for (int i = dropped; i < texts; ++i) {
        for (int end = 0; i != static_cast<int>(but) && end + 1 < static_cast<int>(plain[i].size()); ++end) {
            const int count = same(plain[i], end, last, longest);
            if (count < shortest || count < best) continue;
            ends = count > best ? 1 : ends + 1;
            best = count;
        }
    }
    const Runs found = all.longest_runs(last, longest, but);
    CHECK(found.length == best && static_cast<int>(found.ends.size()) == ends, "%d at %zu places, expected %d at %d",
          found.length, found.ends.size(), best, ends);
    for (const Place& place : found.ends) {
        const auto& text = plain[place.text];
        CHECK(all.tokens(place.text) == text && same(text, place.position, last, longest) == best, "another run");
    }
    for (int i = 0; i < dropped; ++i) CHECK(all.tokens(i).empty(), "text %d was dropped", i);
    all.extend(0, last.data(), last.size());
}

// Sequences that repeat themselves and each other, of which outputs are dropped while they go on.
void test_drafts(const DraftSettings& settings) {
    const auto drafter = std::make_shared<Drafter>(settings);
    const auto pattern = tokens(40, 9);
    std::vector<std::unique_ptr<TokenHistory>> sequences;
    for (int step = 0; step < 400; ++step) {
        if (sequences.empty() || below(10) == 0)
            sequences.push_back(std::make_unique<TokenHistory>(drafter, tokens(below(30), 9)));
        TokenHistory& own = *sequences[below(static_cast<int>(sequences.size()))];
        const int most = below(12);
        const auto forced = tokens(below(2) * below(6), 9);
        const double least = 0.1 * below(5);
        const auto draft = own.draft(most, least, forced);
        for (size_t i = 0; least == 0 && i < std::min(draft.size(), forced.size()); ++i)
            CHECK(draft[i] == forced[i], "token %zu is %d, not %d", i, draft[i], forced[i]);
        CHECK(least > 0 || draft.size() >= std::min<size_t>(most, forced.size()), "%zu tokens", draft.size());
        CHECK(static_cast<int>(draft.size()) <= most, "%zu tokens of %d", draft.size(), most);
        for (const int32_t token : draft) CHECK(token >= 0 && token < 9, "token %d", token);
        const double all = static_cast<double>(draft.size()), expected = own.expected();
        CHECK(expected >= least * all && expected <= all, "%g of %g tokens expected", expected, all);
        const size_t before = own.size();
        auto more = below(2) ? draft : std::vector<int32_t>(pattern.begin() + below(20), pattern.end() - below(20));
        more.push_back(below(9));
        own.extend(more);
        CHECK(own.size() == before + more.size(), "%zu tokens", own.size());
        const Texts& outputs = drafter->outputs;
        CHECK(static_cast<int64_t>(outputs.kept()) <= settings.outputs, "%zu outputs", outputs.kept());
        CHECK(static_cast<int64_t>(outputs.size()) <= settings.output_tokens, "%zu tokens kept", outputs.size());
        if (below(20) == 0) sequences.erase(sequences.begin());
    }
}

void test_refused() {
    for (const DraftSettings& bad : {DraftSettings{0, 3, 0, 0}, DraftSettings{4, 3, 0, 0}}) {
        bool thrown = false;
        try {
            const Drafter drafter(bad);
        } catch (const std::invalid_argument&) {
            thrown = true;
        }
        CHECK(thrown, "runs of %d to %d tokens", bad.shortest, bad.longest);
    }
}

}  // namespace

int main() {
    for (int i = 0; i < 2000; ++i) {
        const int shortest = 1 + below(3), texts = 1 + below(4);
        test_runs(shortest, shortest + below(5), texts, below(texts));
    }
    for (const int64_t outputs : {0, 1, 3, 100})
        for (const int64_t most : {30, 300, 100000}) test_drafts({1 + below(2), 2 + below(4), outputs, 0.05, most});
    test_refused();
    return report("drafts");
}
