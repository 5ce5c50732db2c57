// The argmax of a GEMM's outputs for every row, without most of its sums.
//
// A GEMM of int8 numbers x' and w' bounds that of x and w (Cauchy-Schwarz): |x w - x' w'| <= |x - x'| |w| + |x'| |w -
// w'|. So a row needs only those panels that may have its largest output, by the tiles of Product. The result is the
// same as that of a search of all outputs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "product.h"

namespace hpcdecode::ops {

struct ScreenedWeights {
    Rows exact, rounded;  // panels of the type `in`, and of int8
    const float* norms;   // for every panel those of its outputs' weights w, then those of w - w'
};

struct ScreenedRows {
    Rows exact, rounded;       // of the type `in`, and of int8
    const float* scales;       // of the int8 rows
    const float *lost, *kept;  // norms of x - x', with room for the errors of sums, and of x'
};

class Argmax {
  public:
    // Takes the arguments of Product. Throws std::invalid_argument as Product does, and for types that are not
    // `offered`.
    Argmax(Type in, Type out, int64_t words, int64_t outputs, const std::string& isa);

    static bool offered(Type in, Type out, const std::string& isa);

    // Writes to ids [rows] the first of each row's largest outputs, rounded to `out`, and to values [rows] that output.
    // All numbers must be finite. Returns the share of all outputs that were computed exactly.
    double run(int64_t rows, const ScreenedRows& x, const ScreenedWeights& weight, int64_t* ids, float* values,
               int threads) const;

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
