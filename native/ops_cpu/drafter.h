// Drafts of the tokens that may follow a sequence: what followed where its last tokens occurred before, in itself or in
// what others generated (prompt lookup; suffix decoding of Oliaro et al., "SuffixDecoding", NeurIPS 2025).
//
// Each guess has a chance: how often guesses of its kind have been right, by where the run of last tokens was found,
// how long it is, how many places there are, and how many of them agree. Tokens that a grammar forces, as a tokenizer
// writes what may come alone, are guesses of a kind of their own. It is learnt from every token that follows, of
// guesses that are tried and of those that are not.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "texts.h"

namespace hpcdecode::ops {

struct DraftSettings {
    int shortest, longest;  // run of last tokens that is looked up
    int64_t outputs;        // most outputs of sequences that others look up; 0: each looks up its own tokens alone
    double least;           // chance of a guess that is ever made
    int64_t output_tokens = 1 << 22;  // most tokens of these outputs
};

// How often guesses of each kind have been right.
class Chances {
  public:
    static constexpr int kForced = 2 * 5 * 5 * 5, kKinds = kForced + 1;

    Chances();

    // Returns the kind of a guess after a run of `length` tokens, that `agree` of `places` occurrences have.
    static int kind(bool others, int length, size_t places, size_t agree);

    double of(int kind) const { return (kinds_[kind].right + 0.5) / (kinds_[kind].all + 1); }
    void learn(int kind, bool right);

  private:
    struct Count {
        double right = 0, all = 0;
    };
    std::array<Count, kKinds> kinds_;
};

// What the sequences of an S-rank share.
struct Drafter {
    // Throws std::invalid_argument if not 1 <= shortest <= longest.
    explicit Drafter(const DraftSettings& settings);

    // Begins what a sequence generates, and returns its number.
    uint32_t begin();

    // Takes tokens that a sequence has generated. The oldest outputs are dropped if there are too many.
    void extend(uint32_t output, const std::vector<int32_t>& tokens);

    const DraftSettings settings;
    Texts outputs;
    Chances chances;
};

// The tokens of one sequence, and its drafts.
class TokenHistory {
  public:
    // given: Tokens of the prompt; others do not look them up.
    TokenHistory(std::shared_ptr<Drafter> drafter, const std::vector<int32_t>& given);

    size_t size() const { return own_.tokens(0).size(); }

    // Takes tokens that were generated.
    void extend(const std::vector<int32_t>& tokens);

    // Returns at most `most` tokens that may follow, as long as the chance that all of them do is above `least`.
    // forced: The first of them, by a grammar, if they are worth it; or none.
    std::vector<int32_t> draft(int most, double least, const std::vector<int32_t>& forced = {});

    // How many tokens of the last draft are right on average.
    double expected() const { return expected_; }

  private:
    struct Guess {
        int32_t token;
        int kind;
        double chance;  // that it, and all guesses before it, are right
    };
    using Guesses = std::vector<Guess>;

    Guesses guesses(bool others, int most, double least, Guesses made) const;
    std::vector<int32_t> last_tokens(const Guesses& made) const;
    int64_t after(const Texts& texts, const Place& end, size_t begun, const Guesses& made) const;

    std::shared_ptr<Drafter> drafter_;
    Texts own_;
    uint32_t output_ = 0;  // of the drafter
    double expected_ = 0;
    std::array<Guesses, 2> pending_;  // by where they are from, for the tokens that come next
};

}  // namespace hpcdecode::ops
