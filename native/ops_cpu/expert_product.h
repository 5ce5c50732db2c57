// GEMMs of rows by the weights of experts: every row is multiplied by the weight of the expert that was chosen for it.
//
// Rows of one expert are gathered, so that a panel of its weight is read once for many of them. A row's bits depend on
// nothing but the row and its expert (product.h).
#pragma once
#include <cstdint>

#include "product.h"

namespace hpcdecode::ops {

// The work of a call. Tokens have `choices` rows each.
struct ExpertRows {
    int64_t tokens, choices;
    const int64_t* experts;  // [tokens, choices]
    Rows x;                  // rows of all choices, or one for each token if `shared`
    bool shared;
    Rows out;  // rows of all choices
};

class ExpertProduct {
  public:
    // product: The GEMM of one expert; its heads must be one. experts: Number of experts, whose packed weights follow
    // on each other. first: Number of the first of them; rows of others become zeros. Throws std::invalid_argument.
    ExpertProduct(const Product& product, int64_t experts, int64_t first);

    // Runs on up to `threads` threads of the process's OpenMP team.
    void run(const ExpertRows& rows, const char* weight, int threads) const;

  private:
    struct Call;
    struct Unit;
    class Sorted;

    void take_units(Call& call) const;
    void multiply(const Call& call, const Unit& unit, const Rows& gathered, const Unit* after) const;

    Product product_;
    int64_t experts_, first_;
};

}  // namespace hpcdecode::ops
