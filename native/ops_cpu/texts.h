// Texts of tokens, in which runs that occur again are found by chains of places, as LZ77 compressors find them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace hpcdecode::ops {

// A token of a text.
struct Place {
    uint32_t text, position;
};

// Where the longest run of last tokens occurs: `length` tokens that end at each of `ends`, the newest one first.
struct Runs {
    int length = 0;
    std::vector<Place> ends;
};

class Texts {
  public:
    // Runs have at least `shortest` tokens. Throws std::invalid_argument if that is below 1.
    explicit Texts(int shortest);

    // Begins a text, and returns its number: 0, 1, and so on.
    uint32_t begin();

    // Appends tokens to a text. One that was dropped takes none.
    void extend(uint32_t text, const int32_t* tokens, size_t count);

    // Drops the oldest text, of which there must be one.
    void drop_oldest();

    // Returns how many texts are kept, and how many tokens they have in all.
    size_t kept() const { return texts_.size(); }
    size_t size() const { return count_; }

    // Returns the tokens of a text; none if it was dropped.
    const std::vector<int32_t>& tokens(uint32_t text) const;

    // Returns the longest runs, of at most `longest` tokens, that are the last ones of `tokens`, and that a token
    // follows. It looks at a limited number of places, the newest ones.
    // but: Number of a text that is left out.
    Runs longest_runs(const std::vector<int32_t>& tokens, int longest, uint32_t but) const;

  private:
    struct Text {
        std::vector<int32_t> tokens;
        std::vector<uint64_t> previous;  // a place before in the chain of each token's, plus 1; 0 for none
    };

    size_t slot(const int32_t* last) const;
    void link(uint32_t number, size_t position);
    void grow(size_t added);

    size_t shortest_, count_ = 0;  // tokens in all
    uint32_t oldest_ = 0;          // number of the first text that is kept
    std::deque<Text> texts_;
    std::vector<uint64_t> newest_;  // of each chain, coded as `previous`
};

}  // namespace hpcdecode::ops
