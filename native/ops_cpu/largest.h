// The largest of a product's outputs for every row, without most of its sums.
//
// What a product of int8 numbers x' and w' lacks of the product of x and w has a bound (Cauchy-Schwarz):
// |x w - x' w'| <= |x - x'| |w| + |x'| |w - w'|. So only panels that may have a row's largest output are computed for
// that row, by the tiles of Product: the outputs found are those that a search of all finds.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "product.h"

namespace hpcdecode::ops {

struct ScreenedWeights {
    Rows exact, rounded;  // panels of the type `in`, and of int8
    const float* norms;   // for every panel those of its outputs' weights, then those of what rounding took from them
};

struct ScreenedRows {
    Rows exact, rounded;       // of the type `in`, and of int8
    const float* scales;       // of the int8 numbers
    const float *lost, *kept;  // norms of what rounding took, with room for the errors of sums, and of what it left
};

class Largest {
  public:
    // Of products as Product's. Throws std::invalid_argument as it does, and for what `offered` does not have.
    Largest(Type in, Type out, int64_t words, int64_t outputs, const std::string& isa);

    static bool offered(Type in, Type out, const std::string& isa);

    // ids [rows]: the first of each row's largest outputs, as `out` has them. All numbers are finite.
    // Returns the share of the outputs that were computed as they are.
    double run(int64_t rows, const ScreenedRows& x, const ScreenedWeights& weight, int64_t* ids, int threads) const;

  private:
    struct Candidate;
    struct Call;
    struct Member;

    void screen(const Call& call, Member& me, int member, int members) const;
    std::vector<Candidate> candidates(std::vector<Member>& members, int64_t rows) const;
    void compare(const Call& call, Member& me, const Candidate* begin, const Candidate* end) const;

    Type out_;
    int64_t words_;
    Product exact_, rounded_;
    const struct KernelTable* table_;
};

}  // namespace hpcdecode::ops
