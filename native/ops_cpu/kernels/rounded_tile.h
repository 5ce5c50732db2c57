// The tiles of a GEMM of rows that are rounded to int8 by weights of 4 bits, in products of bytes.
//
// Of 32 inputs the products of bytes are summed in whole numbers, exactly. So a sum is that of
// scale of the row * (scale of the weights * whole + start of the weights * sum of the row).
#pragma once
#include <type_traits>

#include "blocked_tile.h"
#include "round_rows.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

// Sums of products of unsigned and signed bytes, of four each in a lane of 32 bits.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr int kRoundedRows = 6;  // rows whose sums fit registers
inline __m256i add_bytes(__m256i sum, __m256i codes, __m256i x) { return _mm256_dpbusd_epi32(sum, codes, x); }
inline __m256i whole_sums(__m256i sum) { return sum; }
#else
constexpr int kRoundedRows = 3;
inline __m256i add_bytes(__m256i sum, __m256i codes, __m256i x) {  // two sums of 16 bits in a lane
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
    asm("" : "+x"(sum));  // else GCC adds products as a tree, which spills all of them
    return sum;
}
inline __m256i whole_sums(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

inline __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }

// How vectors hold the codes of int4 and of GGUF's forms (code_layout.h): of 4 outputs each, 8 inputs at a time, in two
// lanes of an output. A sum of 16 bits has 8 products of at most 15 * 127.
struct FourBitCodes {
    static constexpr int kVectors = 4, kAtOnce = 4;  // of all outputs; times that a sum of 16 bits takes

    static __m128i order() { return _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
    static __m256i bytes(__m256i nibbles) { return nibbles; }
    static __m256i inputs(const int8_t* x, int time) {
        int64_t eight;
        std::memcpy(&eight, x + 8 * time, sizeof eight);
        return _mm256_set1_epi64x(eight);
    }
    // Returns the sums of 8 outputs.
    static __m256i by_output(const __m256i* sums, int upper) {
        return _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[2 * upper], sums[2 * upper + 1]), 0xd8);
    }
};

// The same of MXFP4: of 8 outputs each, 4 inputs at a time. Codes are shown as twice their number, plus 12.
struct Fp4Codes {
    static constexpr int kVectors = 2, kAtOnce = 4;

    static __m128i order() { return _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15); }
    static __m256i bytes(__m256i nibbles) {
        const __m128i of = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of), nibbles);
    }
    static __m256i inputs(const int8_t* x, int time) {
        int32_t four;
        std::memcpy(&four, x + 4 * time, sizeof four);
        return _mm256_set1_epi32(four);
    }
    static __m256i by_output(const __m256i* sums, int upper) { return sums[upper]; }
};

constexpr int kBlockVectors = 16;      // of codes of a byte, of 32 inputs of half a panel
constexpr int64_t kRoundedBlocks = 8;  // blocks whose codes stay in the first cache for all rows

// Codes as a panel holds them, two in a byte.
template <class Codes>
struct InNibbles {
    static constexpr int64_t kBlockBytes = kBlockVectors / 2 * 32;

    static __m256i at(const char* block, int time, int vector) {
        const __m256i both = ints_at(block + (time / 2 * Codes::kVectors + vector) * 32);
        return Codes::bytes(low_nibbles(time % 2 == 0 ? both : _mm256_srli_epi16(both, 4)));
    }
};

// Codes that were written out, one in a byte.
template <class Codes>
struct InBytes {
    static constexpr int64_t kBlockBytes = kBlockVectors * 32;

    static __m256i at(const char* block, int time, int vector) {
        return ints_at(block + (time * Codes::kVectors + vector) * 32);
    }
};

// Writes the codes of a block.
template <class Codes>
void write_codes(const char* block, char* to) {
    for (int time = 0; time < kBlockVectors / Codes::kVectors; ++time)
        for (int v = 0; v < Codes::kVectors; ++v, to += 32)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), InNibbles<Codes>::at(block, time, v));
}

struct RoundedRows {
    const char* first;
    int64_t row_bytes;

    const RoundedInputs* row(int r) const { return reinterpret_cast<const RoundedInputs*>(first + r * row_bytes); }
};

// Some blocks of half a panel.
struct CodeBlocks {
    const char* codes;
    const Affine* by;
    int64_t count;
};

// Memory that is fetched meanwhile, as many cache lines a block.
struct LinePace {
    const char *from, *end;
    int64_t lines;

    LinePace(const Lines& all, int64_t blocks) : from(all.begin), end(all.end) {
        lines = ((end - from) / kLine + blocks - 1) / blocks;
    }
    void fetch() {
        for (int64_t i = 0; i < lines && from < end; ++i, from += kLine) __builtin_prefetch(from, 0, 2);
    }
};

// Adds R rows' products with some blocks to their sums of half a panel.
template <class Codes, class From, int R>
__attribute__((noinline)) void add_rounded(RoundedRows rows, CodeBlocks blocks, float* sums, LinePace& next) {
    constexpr int kTimes = kBlockVectors / Codes::kVectors;
    for (int64_t b = 0; b < blocks.count; ++b) {
        const char* const codes = blocks.codes + b * From::kBlockBytes;
        __m256i all[R][Codes::kVectors];
#pragma GCC unroll 4
        for (int first = 0; first < kTimes; first += Codes::kAtOnce) {
            __m256i s[R][Codes::kVectors];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < Codes::kVectors; ++v) s[r][v] = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int time = first; time < first + Codes::kAtOnce; ++time) {
                __m256i x[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) x[r] = Codes::inputs(rows.row(r)[b].x, time);
#pragma GCC unroll 4
                for (int v = 0; v < Codes::kVectors; ++v) {
                    const __m256i w = From::at(codes, time, v);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) s[r][v] = add_bytes(s[r][v], w, x[r]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < Codes::kVectors; ++v) {
                    const __m256i whole = whole_sums(s[r][v]);
                    all[r][v] = first == 0 ? whole : _mm256_add_epi32(all[r][v], whole);
                }
        }
        next.fetch();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int upper = 0; upper < 2; ++upper) {
                const RoundedInputs& x = rows.row(r)[b];
                float* const sum = sums + r * kPanel + upper * kEight;
                const __m256 starts = _mm256_mul_ps(blocks.by[b].start[upper], _mm256_set1_ps(x.sum));
                const __m256 whole = _mm256_cvtepi32_ps(Codes::by_output(all[r], upper));
                const __m256 part = _mm256_fmadd_ps(blocks.by[b].scale[upper], whole, starts);
                _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_set1_ps(x.scale), part, _mm256_loadu_ps(sum)));
            }
    }
}

// Adds the products of all rows, some after the other.
template <class Codes, class From, int R>
void add_rounded_rows(int rows, RoundedRows values, const CodeBlocks& blocks, float* sums, LinePace& next) {
    for (; rows >= R; rows -= R, values.first += R * values.row_bytes, sums += R * kPanel)
        add_rounded<Codes, From, R>(values, blocks, sums, next);
    if constexpr (R > 1) add_rounded_rows<Codes, From, R - 1>(rows, values, blocks, sums, next);
}

// Multiplies rows by a panel. Sums run along the blocks in order, however many rows there are.
template <class Form, class Codes, class Out>
void rounded_tile(const Tile& t, int rows) {
    const bool few = rows <= kRoundedRows;
    const int64_t inputs = t.words * 4 / static_cast<int64_t>(sizeof(typename Out::Element)),
                  all = inputs / kBlockInputs;
    alignas(kLine) float sums[kMostTileRows * kPanel];
    alignas(kLine) char bytes[kRoundedBlocks * InBytes<Codes>::kBlockBytes];
    Affine by[kRoundedBlocks];
    begin_sums(t, rows, sums);
    LinePace next(t.next, 2 * all * ((rows + kRoundedRows - 1) / kRoundedRows));
    for (int64_t first = 0; first < all; first += kRoundedBlocks) {
        const int64_t count = std::min(kRoundedBlocks, all - first);
        const RoundedRows values{t.x + first * static_cast<int64_t>(sizeof(RoundedInputs)), t.x_bytes};
        for (int h = 0; h < 2; ++h) {
            const char* half = reinterpret_cast<const char*>(t.panel) + kHeadBytes + h * half_bytes<Form>(inputs);
            const char* codes = half + scale_bytes<Form>(inputs) + first * Form::kBlockBytes;
            for (int64_t b = 0; b < count; ++b) by[b] = Form::affine(half, (first + b) * kBlockInputs);
            if (few) {
                add_rounded_rows<Codes, InNibbles<Codes>, kRoundedRows>(rows, values, {codes, by, count},
                                                                        sums + h * kHalf, next);
                continue;
            }
            for (int64_t b = 0; b < count; ++b)
                write_codes<Codes>(codes + b * Form::kBlockBytes, bytes + b * InBytes<Codes>::kBlockBytes);
            add_rounded_rows<Codes, InBytes<Codes>, kRoundedRows>(rows, values, {bytes, by, count}, sums + h * kHalf,
                                                                  next);
        }
    }
    store_sums<Out>(t, rows, sums);
}

// Of forms whose factors are in vectors of codes.
template <class Form>
constexpr RoundedKernels by_rounded_rows() {
    if constexpr (std::is_void_v<typename Form::Codes>) {
        return {};
    } else {
        using Codes = typename Form::Codes;
        return {{round_row<Codes, FromFloat32>, round_row<Codes, FromBfloat16>},
                {rounded_tile<Form, Codes, VectorToFloat32>, rounded_tile<Form, Codes, VectorToBfloat16>}};
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
