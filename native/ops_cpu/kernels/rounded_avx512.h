// The tiles of a GEMM of rows that are rounded to int8 by weights in few bits, by products of bytes (VNNI) on words of
// four inputs of 16 outputs. Numbers are those of rounded_tile.h, whose sums take other vectors.
#pragma once
#include "rounded_tile.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kByteWords = kBlockInputs / 4;  // of a block

inline __m512i everywhere(const int8_t* table) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

inline __m512i add_bytes(__m512i sum, __m512i positive, __m512i whole) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(positive), "v"(whole));  // GCC 12 moves sums about otherwise
    return sum;
}

// The numbers that codes of 4 bits are multiplied as. If they are signed inputs are taken plus 128.
template <class Vectors>
struct NibbleNumbers {
    static constexpr bool kSigned = false;
    static __m512i of(__m512i codes) { return codes; }
};
template <const int8_t (&table)[16], int scales, int at_once>
struct NibbleNumbers<TableVectors<table, scales, at_once>> {
    static constexpr bool kSigned = true;
    static __m512i of(__m512i codes) { return _mm512_shuffle_epi8(everywhere(table), codes); }
};
template <>
struct NibbleNumbers<Fp4Vectors> {
    static constexpr bool kSigned = false;
    static __m512i of(__m512i codes) { return _mm512_shuffle_epi8(everywhere(kTwiceFp4From12), codes); }
};

// Codes of 4 bits, of four inputs of each output or of eight.
template <class Vectors>
struct NibbleQuads : NibbleNumbers<Vectors> {
    static constexpr int kLoads = Vectors::kVectors / 2;

    // Writes the words of a block, `stride` apart.
    static void write(const char* block, __m512i* to, int stride) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1)), four_bits = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int times = 0; times < Vectors::kTimes; times += 2) {
            __m512i codes[2][kLoads];
#pragma GCC unroll 2
            for (int i = 0; i < kLoads; ++i) {
                const __m512i of = _mm512_loadu_si512(block + (times / 2 * kLoads + i) * 64);
                codes[0][i] = NibbleQuads::of(_mm512_and_si512(of, four_bits));
                codes[1][i] = NibbleQuads::of(_mm512_and_si512(_mm512_srli_epi16(of, 4), four_bits));
            }
#pragma GCC unroll 2
            for (int time = 0; time < 2; ++time, to += kLoads * stride) {
                if constexpr (kLoads == 1) {
                    to[0] = codes[time][0];
                } else {
                    to[0] = _mm512_permutex2var_epi32(codes[time][0], even, codes[time][1]);
                    to[stride] = _mm512_permutex2var_epi32(codes[time][0], odd, codes[time][1]);
                }
            }
        }
    }
};

// Codes of a byte, of two inputs of 16 outputs in 32 bytes.
struct ByteQuads {
    static constexpr bool kSigned = true;

    static void write(const char* block, __m512i* to, int stride) {
        const __m128i pairs = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        uint16_t places[32];  // of a pair of inputs, then of the next pair
        for (int output = 0; output < kHalf; ++output)
            for (int later = 0; later < 2; ++later)
                places[2 * output + later] =
                    static_cast<uint16_t>(output % kEight * 2 + output / kEight + later * kHalf);
        const __m512i words = _mm512_loadu_si512(places);
#pragma GCC unroll 8
        for (int word = 0; word < kByteWords; ++word) {
            const __m512i codes = _mm512_loadu_si512(block + word * 64);
            to[stride * word] =
                _mm512_permutexvar_epi16(words, _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(pairs)));
        }
    }
};

template <class Vectors>
struct QuadsOf : NibbleQuads<Vectors> {};
template <>
struct QuadsOf<ByteVectors> : ByteQuads {};
template <>
struct QuadsOf<TwoScaleVectors> : ByteQuads {};

// A block of some halves of a panel as it is multiplied.
template <int scales, int halves>
struct alignas(64) QuadBlock {
    __m512i words[kByteWords][halves];
    __m512i begins[scales][halves];  // sums of words that take inputs plus 128
    __m512 scale[scales][halves], start[scales][halves];
};

inline __m512 both(const __m256* halves) { return _mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1); }

// Some blocks of a panel.
struct PanelBlocks {
    const char* halves[2];
    int64_t inputs, first, count;
};

// Takes a block of a panel, of half `h` to place `to`.
template <class Form, int halves, class Vectors = typename Form::Vectors>
inline void take_block(const PanelBlocks& from, int64_t b, int h, int to, QuadBlock<Vectors::kScales, halves>& q) {
    constexpr int kPart = kByteWords / Vectors::kScales;
    const int64_t block = from.first + b;
    const char* const half = from.halves[h];
    QuadsOf<Vectors>::write(half + scale_bytes<Form>(from.inputs) + block * Form::kBlockBytes, &q.words[0][to], halves);
#pragma GCC unroll 2
    for (int part = 0; part < Vectors::kScales; ++part) {
        const Affine by = Form::affine(half, block * kBlockInputs + part * kBlockInputs / Vectors::kScales);
        q.scale[part][to] = both(by.scale);
        q.start[part][to] = both(by.start);
        __m512i sum = _mm512_setzero_si512();
        if constexpr (QuadsOf<Vectors>::kSigned)
#pragma GCC unroll 8
            for (int word = part * kPart; word < (part + 1) * kPart; ++word)
                sum = add_bytes(sum, _mm512_set1_epi8(static_cast<char>(128)), q.words[word][to]);
        q.begins[part][to] = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
    }
}

// Adds R rows' products with block b to their sums of some halves.
template <class Vectors, int R, int halves, int scales = Vectors::kScales>
inline void add_block(const RoundedRows<RoundedInputs<int8_t>>& rows, int64_t b, const QuadBlock<scales, halves>& q,
                      __m512 (&s)[R][halves]) {
    constexpr int kPart = kByteWords / scales;
    constexpr bool kSigned = QuadsOf<Vectors>::kSigned;
#pragma GCC unroll 2
    for (int part = 0; part < scales; ++part) {
        __m512i whole[R][halves];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int h = 0; h < halves; ++h) whole[r][h] = kSigned ? q.begins[part][h] : _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int word = part * kPart; word < (part + 1) * kPart; ++word)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                __m512i x = broadcast(reinterpret_cast<const char*>(rows.row(r)[b].x + 4 * word));
                if constexpr (kSigned) x = _mm512_xor_si512(x, _mm512_set1_epi32(static_cast<int>(0x80808080u)));
#pragma GCC unroll 2
                for (int h = 0; h < halves; ++h)
                    whole[r][h] = kSigned ? add_bytes(whole[r][h], x, q.words[word][h])
                                          : add_bytes(whole[r][h], q.words[word][h], x);
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int h = 0; h < halves; ++h) {
                const auto& x = rows.row(r)[b];
                const __m512 starts = _mm512_mul_ps(q.start[part][h], _mm512_set1_ps(x.sum));
                const __m512 own = _mm512_fmadd_ps(q.scale[part][h], _mm512_cvtepi32_ps(whole[r][h]), starts);
                s[r][h] = _mm512_fmadd_ps(_mm512_set1_ps(x.scale), own, s[r][h]);
            }
    }
}

// Adds the products of all rows with some blocks, R rows at a time, to their sums.
template <class Vectors, int R, int scales = Vectors::kScales>
__attribute__((noinline)) void add_quads(int rows, RoundedRows<RoundedInputs<int8_t>> values,
                                         const QuadBlock<scales, 2>* blocks, int64_t count, float* sums,
                                         LinePace& next) {
    for (; rows >= R; rows -= R, values.first += R * values.row_bytes, sums += R * kPanel) {
        __m512 s[R][2];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) s[r][h] = _mm512_loadu_ps(sums + r * kPanel + h * kHalf);
        for (int64_t b = 0; b < count; ++b) {
            next.fetch();
            add_block<Vectors, R, 2>(values, b, blocks[b], s);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) _mm512_storeu_ps(sums + r * kPanel + h * kHalf, s[r][h]);
    }
    if constexpr (R > 1)
        if (rows > 0) add_quads<Vectors, R - 1>(rows, values, blocks, count, sums, next);
}

// Adds the products of R rows with some blocks, which are taken for them alone.
template <class Form, int R, class Vectors = typename Form::Vectors>
__attribute__((noinline)) void add_few(int rows, RoundedRows<RoundedInputs<int8_t>> values, const PanelBlocks& blocks,
                                       float* sums, LinePace& next) {
    if constexpr (R > 1)
        if (rows < R) return add_few<Form, R - 1>(rows, values, blocks, sums, next);
    __m512 s[2][R][1];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) s[h][r][0] = _mm512_loadu_ps(sums + r * kPanel + h * kHalf);
    for (int64_t b = 0; b < blocks.count; ++b) {
        next.fetch();
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            QuadBlock<Vectors::kScales, 1> q;
            take_block<Form>(blocks, b, h, 0, q);
            add_block<Vectors, R, 1>(values, b, q, s[h]);
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + r * kPanel + h * kHalf, s[h][r][0]);
}

// Multiplies rows by a panel. Sums run along the blocks in order, however many rows there are.
template <class Form, class Out>
void quad_tile(const Tile& t, int rows) {
    using Vectors = typename Form::Vectors;
    using Inputs = RoundedInputs<int8_t>;
    constexpr int kFew = 3;  // rows for which words stay in registers
    const int64_t inputs = t.words * 4 / static_cast<int64_t>(sizeof(typename Out::Element));
    const int64_t all = inputs / kBlockInputs;
    alignas(kLine) float sums[kMostTileRows * kPanel];
    const char* const panel = reinterpret_cast<const char*>(t.panel) + kHeadBytes;
    begin_sums(t, rows, sums);
    LinePace next(t.next, all * ((rows + kRoundedRows - 1) / kRoundedRows));
    PanelBlocks blocks{{panel, panel + half_bytes<Form>(inputs)}, inputs, 0, all};
    if (rows <= kFew) {
        add_few<Form, kFew>(rows, {t.x, t.x_bytes}, blocks, sums, next);
    } else {
        QuadBlock<Vectors::kScales, 2> taken[kRoundedBlocks];
        for (; blocks.first < all; blocks.first += kRoundedBlocks) {
            blocks.count = std::min(kRoundedBlocks, all - blocks.first);
            for (int64_t b = 0; b < blocks.count; ++b)
                for (int h = 0; h < 2; ++h) take_block<Form>(blocks, b, h, h, taken[b]);
            const RoundedRows<Inputs> values{t.x + blocks.first * static_cast<int64_t>(sizeof(Inputs)), t.x_bytes};
            add_quads<Vectors, kRoundedRows>(rows, values, taken, blocks.count, sums, next);
        }
    }
    store_sums<Out>(t, rows, sums);
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
