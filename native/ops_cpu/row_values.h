// Rows of x as the tiles of an instruction set take them, in memory that the thread uses again.
#pragma once
#include <cstdint>
#include <vector>

#include "fused_kernel.h"

namespace hpcdecode::ops {

// Writes the values of some words of a row: kValueWords words of 4 bytes for each, or for rounded rows RoundedInputs.
using ValuesKernel = void (*)(int64_t words, const char* x, char* values);
constexpr int64_t kValueWords = 2;

// 32 inputs of a row, rounded to int8: each is close to scale * x.
template <class Number>
struct RoundedInputs {
    float scale;   // NaN if an input is not finite
    float sum;     // of x
    Number x[32];  // in the order of a form's codes
};

class RowValues {
  public:
    // kernel: Or null, for rows that stay as they are.
    // words: Of a row.
    // bytes: Of its values.
    RowValues(ValuesKernel kernel, int64_t rows, const Rows& x, int64_t words, int64_t bytes);
    ~RowValues();
    RowValues(const RowValues&) = delete;
    RowValues& operator=(const RowValues&) = delete;

    const Rows& rows() const { return rows_; }

  private:
    Rows rows_;
    std::vector<char> memory_;
};

}  // namespace hpcdecode::ops
