// GEMMs of rows by the weights of experts: every row is multiplied by the weight of the expert that was chosen for it.
//
// With adapters (LoRA) every adapter has weights of its own for every expert, and a row is multiplied by those that its
// token's adapter has for its expert. They take the place of the expert's (h = A x), or update its outputs (+ B h).
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
    Rows experts;   // int64 [choices] of a token
    Rows x;         // of a token: rows of all choices, or one if they are shared
    Rows out;       // of a token: rows of all choices
    Rows adapters;  // int64 of a token, -1 for none; without adapters not read
    Rows low, b;    // with an update: h of all choices, and the packed B of every adapter's experts
};

class ExpertProduct {
  public:
    // product: The GEMM of one expert; its heads must be one. Its update is that of all adapters' experts. experts:
    // Number of experts, whose packed weights follow on each other. first: Number of the first of them; rows of others
    // become zeros. choices: Rows of a token. shared: `x` has one row for all choices. adapters: Number of adapters,
    // whose weights of all experts follow on each other, so that rows of tokens without an adapter become zeros; 0 for
    // weights of the experts. Throws std::invalid_argument.
    ExpertProduct(const Product& product, int64_t experts, int64_t first, int64_t choices, bool shared,
                  int64_t adapters);

    // Computes what one of `members` threads takes of it, which all call this with the same arguments.
    // next: Counts what has been taken, from `begin` on. Returns where it begins for the next call.
    int64_t run(const ExpertRows& rows, const char* weight, int member, int members, std::atomic<int64_t>& next,
                int64_t begin) const;

    // Returns how many tensors a stage of a chain has.
    size_t tensors() const { return product_.updates() ? 7 : adapters_ > 0 ? 5 : 4; }

  private:
    struct Call;
    struct Unit;
    class Sorted;

    int64_t weight_of(const ExpertRows& rows, int64_t r) const;
    void multiply(const Call& call, const Unit& unit, const Rows& gathered, const char* next) const;
    bool multiply_updated(const Call& call, const Unit& unit, const Rows& gathered, const char* next) const;

    Product product_;
    int64_t experts_, first_, choices_;
    bool shared_;
    int64_t adapters_;
};

}  // namespace hpcdecode::ops
