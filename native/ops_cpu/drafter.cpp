#include "drafter.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hpcdecode::ops {

namespace {

constexpr double kRemembered = 512;   // guesses of a kind; then half of them are forgotten
constexpr double kForcedAtFirst = 8;  // tokens that a grammar has forced and that were right, before any is known
constexpr uint32_t kNone = UINT32_MAX;

// Returns how many of the numbers `above` are at most `value`.
template <size_t N, class T>
int step(const std::array<T, N>& above, T value) {
    return static_cast<int>(std::count_if(above.begin(), above.end(), [&](T least) { return value >= least; }));
}

struct Vote {
    int64_t token;
    size_t agree, places;  // that have it, and that have any
};

// Returns the token that most places have, of several the first one's; those below 0 do not count.
Vote vote(const std::vector<int64_t>& tokens) {
    Vote won{-1, 0, 0};
    for (const int64_t token : tokens) {
        if (token < 0) continue;
        ++won.places;
        if (token == won.token) continue;
        const auto agree = static_cast<size_t>(std::count(tokens.begin(), tokens.end(), token));
        if (agree > won.agree) won = {token, agree, won.places};
    }
    return won;
}

}  // namespace

int Chances::kind(bool others, int length, size_t places, size_t agree) {
    const int long_enough = step<4, int>({2, 4, 8, 16}, length), many = step<4, size_t>({2, 3, 5, 12}, places);
    const int sure = agree == places ? 4 : static_cast<int>(4 * agree / places);
    return ((others * 5 + long_enough) * 5 + many) * 5 + sure;
}

Chances::Chances() { kinds_[kForced] = {kForcedAtFirst, kForcedAtFirst}; }

void Chances::learn(int kind, bool right) {
    Count& count = kinds_[kind];
    count.right += right;
    count.all += 1;
    if (count.all >= kRemembered) count = {count.right / 2, count.all / 2};
}

Drafter::Drafter(const DraftSettings& given) : settings(given), outputs(given.shortest) {
    if (given.longest < given.shortest) {
        throw std::invalid_argument("Drafter: expected runs of at least " + std::to_string(given.shortest) +
                                    " tokens, got " + std::to_string(given.longest));
    }
}

uint32_t Drafter::begin() {
    if (settings.outputs < 1) return kNone;
    if (outputs.kept() == static_cast<size_t>(settings.outputs)) outputs.drop_oldest();
    return outputs.begin();
}

void Drafter::extend(uint32_t output, const std::vector<int32_t>& tokens) {
    outputs.extend(output, tokens.data(), tokens.size());
    while (outputs.size() > static_cast<size_t>(settings.output_tokens)) outputs.drop_oldest();
}

TokenHistory::TokenHistory(std::shared_ptr<Drafter> drafter, const std::vector<int32_t>& given)
    : drafter_(std::move(drafter)), own_(drafter_->settings.shortest) {
    own_.extend(own_.begin(), given.data(), given.size());
    output_ = drafter_->begin();
}

void TokenHistory::extend(const std::vector<int32_t>& tokens) {
    if (tokens.empty()) return;
    for (Guesses& guesses : pending_) {
        bool right = true;
        for (size_t i = 0; right && i < std::min(guesses.size(), tokens.size()); ++i) {
            right = guesses[i].token == tokens[i];
            drafter_->chances.learn(guesses[i].kind, right);
        }
        guesses.clear();
    }
    own_.extend(0, tokens.data(), tokens.size());
    drafter_->extend(output_, tokens);
}

std::vector<int32_t> TokenHistory::draft(int most, double least, const std::vector<int32_t>& forced) {
    expected_ = 0;
    if (most < 1) return {};
    Guesses begun;
    for (const int32_t token : forced) {
        if (static_cast<int>(begun.size()) == most) break;
        const double chance = (begun.empty() ? 1 : begun.back().chance) * drafter_->chances.of(Chances::kForced);
        if (chance <= least) break;
        begun.push_back({token, Chances::kForced, chance});
    }
    for (int others = 0; others < (drafter_->settings.outputs > 0 ? 2 : 1); ++others)
        pending_[others] = guesses(others, most, least, begun);
    const auto chance = [&](const Guesses& some) { return some.size() > begun.size() ? some[begun.size()].chance : 0; };
    Guesses& best = pending_[chance(pending_[1]) > chance(pending_[0])];
    std::vector<int32_t> tokens;
    for (const Guess& guess : best) {
        if (guess.chance <= least || guess.chance < drafter_->settings.least) break;
        tokens.push_back(guess.token);
        expected_ += guess.chance;
    }
    return tokens;
}

// Returns guesses behind those that are `made`, from the tokens of the sequence itself or of others, up to the first
// one that is not worth it.
TokenHistory::Guesses TokenHistory::guesses(bool others, int most, double least, Guesses made) const {
    const Texts& texts = others ? drafter_->outputs : own_;
    const size_t begun = made.size();
    Runs runs = texts.longest_runs(last_tokens(made), drafter_->settings.longest, others ? output_ : kNone);
    double chance = made.empty() ? 1 : made.back().chance;
    while (static_cast<int>(made.size()) < most && (made.empty() || chance > least)) {
        std::vector<int64_t> next;
        for (const Place& end : runs.ends) next.push_back(after(texts, end, begun, made));
        const Vote won = vote(next);
        if (won.places == 0) break;
        const int length = runs.length + static_cast<int>(made.size() - begun);
        const int kind = Chances::kind(others, length, won.places, won.agree);
        chance *= drafter_->chances.of(kind);
        made.push_back({static_cast<int32_t>(won.token), kind, chance});
        std::vector<Place> agreeing;
        for (size_t i = 0; i < next.size(); ++i)
            if (next[i] == won.token) agreeing.push_back(runs.ends[i]);
        runs.ends.swap(agreeing);
    }
    return made;
}

// Returns the last tokens of the sequence, as many as are looked up, with guesses behind them.
std::vector<int32_t> TokenHistory::last_tokens(const Guesses& made) const {
    const std::vector<int32_t>& own = own_.tokens(0);
    const size_t kept = std::min(own.size(), static_cast<size_t>(drafter_->settings.longest));
    std::vector<int32_t> tokens(own.end() - static_cast<std::ptrdiff_t>(kept), own.end());
    for (const Guess& guess : made) tokens.push_back(guess.token);
    return tokens;
}

// Returns the token that follows a run, behind those that were `made` of it, all but the first `begun`; -1 at the end
// of what another generated. A run that lies at the sequence's own end goes on with its guesses.
int64_t TokenHistory::after(const Texts& texts, const Place& end, size_t begun, const Guesses& made) const {
    const std::vector<int32_t>& tokens = texts.tokens(end.text);
    const size_t position = end.position + 1 + made.size() - begun;
    if (position < tokens.size()) return tokens[position];
    return &texts == &own_ ? made[position - tokens.size()].token : -1;
}

}  // namespace hpcdecode::ops
