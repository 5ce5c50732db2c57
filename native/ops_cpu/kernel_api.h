// The table of an instruction set's kernels.
#pragma once
#include <array>
#include <string>

#include "fused_kernel.h"
#include "product.h"

namespace hpcdecode::ops {

using Kernel = void (*)(const Step&, float* scratch);
// Multiplies a function of the first half of every row of a panel's results [rows, kPanel] by the second half.
using GateKernel = void (*)(int64_t rows, const char* results, char* out, int64_t out_bytes);

// A panel's outputs for some rows by int8 numbers, and what bounds their distance from the exact ones (argmax.h).
struct Screening {
    int rows, columns;
    const float* results;  // [rows, kPanel], but for the rows' scales
    const float* norms;    // [2, kPanel]
    const float *scales, *lost, *kept;
    float* floors;  // by row, what the largest output is at least; raised
    float* most;    // by row, what this panel's outputs are at most
};
// Returns a bit for every row, of kScreenRows at most, whose largest output may be among these.
using ScreenKernel = uint32_t (*)(const Screening&);
constexpr int kScreenRows = 32;

// GEMM tiles by input type and output type, and gates by output type; nullptr if there is none.
struct Products {
    TileKernel of[3][2];
    GateKernel silu[2], gelu_tanh[2];
    ScreenKernel screen;
    int rows[4] = {kTileRows, kTileRows, kTileRows, 0};  // of a tile, at most, by input type
    ValuesKernel values[4] = {};                         // what tiles take in place of x, or null, by input type
};

constexpr int kFloors = 3;
constexpr int kLeastRun = 16, kMostRuns = 16;  // of a rotation: numbers of a run, and runs

// By rows that are rounded to int8, or null, by type of x and of the results.
struct RoundedKernels {
    ValuesKernel values[2] = {};
    TileKernel tile[2] = {};
    int64_t bytes = 0;  // of the values of 32 inputs
};

// Of a form of weights, but `plain`.
using ExpandKernel = void (*)(const char* panel, int64_t inputs, uint32_t* out);
struct FormKernels {
    DirectTiles direct[2];          // by type of x and of the results
    ExpandKernel expand = nullptr;  // to a plain panel of bfloat16
    RoundedKernels rounded = {};
};

struct KernelTable {
    const char* name;
    Kernel run[static_cast<int>(Op::count)][2];  // by type of the result
    void (*load[4])(int64_t count, const char* in, float* out);
    void (*store[4])(int64_t count, const float* in, char* out);
    void (*add[2])(int64_t count, const char* in, char* out);  // in to out, rounded to their type
    Products products;
    std::array<FormKernels, kForms> forms;
    float (*largest)(int64_t count, const float* values);
    void (*weigh)(int64_t count, float top, float by, float* logits);  // to exp((logit - top) * by)
    void (*sums_from)(int64_t count, const float* weights, const float* floors, double* sums);  // adds, of kFloors
    float (*sum_from)(int64_t count, const float* weights, float floor);                        // of those >= floor
};

// Throws std::invalid_argument for a name that this build does not have.
const KernelTable& kernels_for(const std::string& isa);

}  // namespace hpcdecode::ops
