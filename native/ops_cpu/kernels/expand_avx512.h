// Products over weights in few bits, expanded in registers for few rows, or to a panel that many rows share.
#pragma once
#include "form_tile.h"
#include "tile.h"
#include "words_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

template <class Form>
constexpr int64_t kLoadBytes = Form::kBlockBytes * Form::kWords / (kBlockInputs / 2);  // of the codes of kWords words

// Whether the words of load i of a block have other scales than those before.
template <class Form>
constexpr bool begins_group(int i) {
    return i > 0 && 2 * i * Form::kWords % Form::kScaleInputs == 0;
}

// Writes the words of some inputs of half a panel, whole blocks of them.
template <class Form>
inline void expand_half(const char* panel, int64_t inputs, int half, int64_t begin, int64_t end, uint32_t* to) {
    const char* scales = panel + kHeadBytes + half * half_bytes<Form>(inputs);
    const char* codes = scales + scale_bytes<Form>(inputs) + begin / kBlockInputs * Form::kBlockBytes;
    to += half * kHalf;
    for (int64_t input = begin; input < end; input += kBlockInputs) {
        auto by = Form::scales(scales, input);
        for (int i = 0; i < kBlockInputs / 2 / Form::kWords; ++i, codes += kLoadBytes<Form>) {
            if constexpr (Form::kScaleInputs < kBlockInputs)
                if (begins_group<Form>(i)) by = Form::scales(scales, input + 2 * i * Form::kWords);
            auto some = Form::codes(codes);
#pragma GCC unroll 8
            for (int k = 0; k < Form::kWords; ++k, to += kPanel) _mm512_storeu_si512(to, Form::next(some, by));
        }
    }
}

template <class Form>
void expand_words(const char* panel, int64_t inputs, uint32_t* out) {
    std::memcpy(out, panel, kHeadBytes);
    for (int half = 0; half < 2; ++half) expand_half<Form>(panel, inputs, half, 0, inputs, out + kPanel);
}

// Multiplies R rows by `count` halves of panels, from half `first` on.
template <class Form, class Out, int R, int count>
inline void halves(const Tile& t, int first, Lines& next) {
    const int64_t inputs = 2 * t.words;
    const auto panel_of = [&](int half) { return reinterpret_cast<const char*>(t.panel + half / 2 * t.panel_words); };
    const char *scales[count], *codes[count];
    __m512 sums[R][count];
#pragma GCC unroll 4
    for (int v = 0; v < count; ++v) {
        scales[v] = panel_of(first + v) + kHeadBytes + (first + v) % 2 * half_bytes<Form>(inputs);
        codes[v] = scales[v] + scale_bytes<Form>(inputs);
    }
#pragma GCC unroll 20
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < count; ++v) {
            const auto* head = reinterpret_cast<const uint32_t*>(panel_of(first + v));
            sums[r][v] = Bfloat16::start(head + (first + v) % 2 * kLanes);
        }
    const char* x = t.x;
    for (int64_t input = 0; input < inputs; input += kBlockInputs) {
        constexpr int64_t kFetch = count * (Form::kBlockBytes + Form::kScaleBytes * kBlockInputs / Form::kGroup);
        for (int64_t line = 0; line < kFetch && next.begin < next.end; line += kLine, next.begin += kLine)
            __builtin_prefetch(next.begin, 0, 2);
        typename Form::Scales by[count];
#pragma GCC unroll 4
        for (int v = 0; v < count; ++v) by[v] = Form::scales(scales[v], input);
        for (int i = 0; i < kBlockInputs / 2 / Form::kWords; ++i) {
            if constexpr (Form::kScaleInputs < kBlockInputs)
                if (begins_group<Form>(i))
#pragma GCC unroll 4
                    for (int v = 0; v < count; ++v) by[v] = Form::scales(scales[v], input + 2 * i * Form::kWords);
            typename Form::Codes some[count];
#pragma GCC unroll 4
            for (int v = 0; v < count; ++v) {
                some[v] = Form::codes(codes[v]);
                codes[v] += kLoadBytes<Form>;
            }
#pragma GCC unroll 8
            for (int k = 0; k < Form::kWords; ++k, x += sizeof(uint32_t)) {
                Words w[count];
#pragma GCC unroll 4
                for (int v = 0; v < count; ++v) w[v] = Form::next(some[v], by[v]);
#pragma GCC unroll 20
                for (int r = 0; r < R; ++r) {
                    const Words a = broadcast(x + r * t.x_bytes);
#pragma GCC unroll 4
                    for (int v = 0; v < count; ++v) sums[r][v] = Bfloat16::add(sums[r][v], a, w[v]);
                }
            }
        }
    }
#pragma GCC unroll 20
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < count; ++v) {
            const int panel = (first + v) / 2, column = (first + v) % 2 * kLanes;
            const int wanted = (panel + 1 < t.panels ? kPanel : t.columns) - column;
            if (wanted > 0) Out::store(t.out + panel * t.out_apart + r * t.out_bytes, column, wanted, sums[r][v]);
        }
}

constexpr int kWholeRows = 12;  // whose sums of a panel fit the registers

// Multiplies R rows by a panel or two, word by word in order as with `plain` weights.
template <class Form, class Out, int R>
void expanding_tile(const Tile& t) {
    Lines next = t.next;
    if constexpr (R <= Form::kPairedRows)
        if (t.panels == 2) return halves<Form, Out, R, 4>(t, 0, next);
    if constexpr (R <= kWholeRows) {
        halves<Form, Out, R, 2>(t, 0, next);
    } else {
        halves<Form, Out, R, 1>(t, 0, next);
        halves<Form, Out, R, 1>(t, 1, next);
    }
}

template <class Form>
struct ExpandingTile {
    template <int R>
    static constexpr auto* kernel = expanding_tile<Form, ToBfloat16, R>;
};

template <class Factors>
struct InRegisters {
    using Form = typename Factors::Words;
    static constexpr FormKernels kKernels = {
        {form_tiles<Factors, VectorFloat32, VectorToFloat32>,
         {by_rows<ExpandingTile<Form>, Form::kDirectRows>, Form::kDirectRows, false, Form::kPairedRows}},
        expand_words<Form>,
        by_rounded_rows<Factors>()};
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
