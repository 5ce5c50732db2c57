// The tiles of a GEMM over weights in few bits in the compiler's vectors: the weights of some inputs are expanded to
// factors, which stay in the first cache for all rows.
#pragma once
#include <type_traits>

#include "blocked_tile.h"
#include "form_factors.h"
#if defined(__AVX512VNNI__)
#include "rounded_avx512.h"
#else
#include "rounded_tile.h"
#endif

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

// Writes the factors of some inputs of half a panel, whole blocks of them, rounded to the type of x.
// inputs: Of the panel.
template <class Form, class Out, int64_t stride>
void write_factors_of(const char* half, int64_t inputs, int64_t first, int64_t count, float* to) {
    constexpr bool round = !std::is_same_v<typename Out::Element, float>;
    const char* codes = half + scale_bytes<Form>(inputs) + first / kBlockInputs * Form::kBlockBytes;
    for (int64_t input = first; input < first + count; input += kBlockInputs, codes += Form::kBlockBytes) {
        Form::template write<round, stride>(half, input, codes, to);
        to += kBlockInputs * stride;
    }
}

// Multiplies rows by a panel. Sums run along the inputs in order, as with `plain` weights.
template <class Form, class Unit, class Out>
void form_tile(const Tile& t, int rows) {
    const bool whole = rows <= kFewRows || kVectors == kAllVectors;  // take both halves at a time
    const int64_t inputs = t.words * Unit::kParts, most = whole ? kWritten / 2 : kWritten;
    alignas(kLine) float sums[kMostTileRows * kPanel];
    alignas(kLine) float factors[kWritten * kHalf];
    const auto* const written = reinterpret_cast<const uint32_t*>(factors);
    const auto half = [&](int number) {
        return reinterpret_cast<const char*>(t.panel) + kHeadBytes + number * half_bytes<Form>(inputs);
    };
    begin_sums(t, rows, sums);
    Fetch next(t.next, passes(rows) * inputs, 1);
    for (int64_t first = 0; first < inputs; first += most) {
        const int64_t count = std::min(most, inputs - first);
        const auto values = values_from<typename Unit::Value>(t, first);
        if (whole) {
            for (int h = 0; h < 2; ++h)
                write_factors_of<Form, Out, kPanel>(half(h), inputs, first, count, factors + h * kHalf);
            add_groups<Unit, Written<Unit, kPanel>, kAllVectors, kFewRows>(rows, values, written, count, sums, next);
            continue;
        }
        for (int h = 0; h < 2; ++h) {
            write_factors_of<Form, Out, kHalf>(half(h), inputs, first, count, factors);
            add_groups<Unit, Written<Unit, kHalf>>(rows, values, written, count, sums + h * kHalf, next);
        }
    }
    store_sums<Out>(t, rows, sums);
}

template <class Form, class Unit, class Out>
constexpr DirectTiles form_tiles = {form_tile<Form, Unit, Out>, kMostTileRows, true};

#if defined(__AVX512VNNI__)
template <class Form, class Out>
constexpr TileKernel kRoundedTile = quad_tile<Form, Out>;
#else
template <class Form, class Out>
constexpr TileKernel kRoundedTile = rounded_tile<Form, Out>;
#endif

template <class Form>
constexpr RoundedKernels by_rounded_rows() {
    using Vectors = typename Form::Vectors;
    if constexpr (std::is_void_v<Vectors>) {
        return {};
    } else {
        return {{round_row<Vectors, FromFloat32>, round_row<Vectors, FromBfloat16>},
                {kRoundedTile<Form, VectorToFloat32>, kRoundedTile<Form, VectorToBfloat16>},
                sizeof(typename Vectors::Inputs)};
    }
}

// Kernels of a form that expands to factors.
template <class Factors>
struct ByFactors {
    static constexpr FormKernels kKernels = {
        {form_tiles<Factors, VectorFloat32, VectorToFloat32>, form_tiles<Factors, VectorBfloat16, VectorToBfloat16>},
        nullptr,
        by_rounded_rows<Factors>()};
};

// Returns the kernels of all forms, in the order of WeightForm.
// By: Has those of a form that expands, given its factors.
template <template <class> class By>
constexpr std::array<FormKernels, kForms> form_kernels() {
    return {FormKernels{},
            By<Int4Factors>::kKernels,
            By<Mxfp4Factors>::kKernels,
            By<Fp8Factors>::kKernels,
            By<Q41Factors>::kKernels,
            By<Q80Factors>::kKernels,
            By<Q4KFactors>::kKernels,
            By<Q5KFactors>::kKernels,
            By<Q6KFactors>::kKernels,
            widened<WidenedBfloat16>,
            widened<WidenedFloat16>,
            By<Nf4Factors>::kKernels,
            By<Nvfp4Factors>::kKernels,
            By<I8Factors>::kKernels,
            By<Q2KFactors>::kKernels,
            By<Q3KFactors>::kKernels,
            By<Iq4NlFactors>::kKernels,
            By<Iq4XsFactors>::kKernels,
            By<Mxfp8Factors>::kKernels,
            By<Q51Factors>::kKernels};
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
