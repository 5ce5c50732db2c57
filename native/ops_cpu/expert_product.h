// GEMMs of rows by the weights of experts: every row is multiplied by the weight of the expert that was chosen for it.
//
// Rows of one expert are gathered, so that a panel of its weight is read once for many of them. A row's bits depend on
// nothing but the row and its expert (product.h).
#pragma once
#include <atomic>
#include <cstdint>

#include "product.h"

namespace hpcdecode::ops {

// The work of a call. Tokens have `choices` rows each, which follow on each other without gaps.
struct ExpertRows {
    int64_t tokens;
    Rows experts;  // int64 [choices] of a token
    Rows x;        // of a token: rows of all choices, or one if they are shared
    Rows out;      // of a token: rows of all choices
};

class ExpertProduct {
  public:
    // product: The GEMM of one expert; its heads must be one. experts: Number of experts, whose packed weights follow
    // on each other. first: Number of the first of them; rows of others become zeros. choices: Rows of a token.
    // shared: `x` has one row for all choices. Throws std::invalid_argument.
    ExpertProduct(const Product& product, int64_t experts, int64_t first, int64_t choices, bool shared);

    // Computes what one of `members` threads takes of it, which all call this with the same arguments.
    // next: Counts what has been taken, from `begin` on. Returns where it begins for the next call.
    int64_t run(const ExpertRows& rows, const char* weight, int member, int members, std::atomic<int64_t>& next,
                int64_t begin) const;

  private:
    struct Call;
    struct Unit;
    class Sorted;

    void multiply(const Call& call, const Unit& unit, const Rows& gathered, const Unit* after) const;

    Product product_;
    int64_t experts_, first_, choices_;
    bool shared_;
};

}  // namespace hpcdecode::ops
