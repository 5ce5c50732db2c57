// Expands a panel of weights in few bits to one of float32 or bfloat16, in loops of any instruction set.
#pragma once
#include "../weight_form.h"
#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kHalf = kPanel / 2;           // outputs
using Block = float[kBlockInputs][kHalf];   // weights of some inputs
constexpr int64_t kHeadBytes = kPanel * 4;  // of a panel, before the weights
constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

inline float from_half(uint16_t x) {
    const float magnitude = bits<float>((x & 0x7fffu) << 13) * 0x1p112f;
    return (x & 0x8000u) != 0 ? -magnitude : magnitude;
}

template <class T>
inline T loaded(const char* p, int64_t i) {
    T x;
    std::memcpy(&x, p + i * sizeof x, sizeof x);
    return x;
}

// Scales of a form for 32 inputs begin here.
template <class Layout>
inline const char* scales_of(const char* scales, int64_t input) {
    return scales + input / Layout::kGroup * Layout::kScaleBytes;
}

// A weight is code * scale + start.
struct Affine16 {
    float scale[kHalf], start[kHalf];
};

// Inputs of a block by output: the loops below run over outputs, so that compilers make vectors of them.
inline void decode_nibbles(const Affine16& by, const char* codes, Block& to) {
    for (int words = 0; words < 2; ++words)
        for (int own = 0; own < 2; ++own) {  // of the inputs of a word
            uint32_t of[kHalf];
            for (int o = 0; o < kHalf; ++o) of[o] = loaded<uint32_t>(codes, words * 32 + o * 2 + own);
            for (int k = 0; k < 8; ++k) {
                float* row = to[words * 16 + 2 * k + own];
                for (int o = 0; o < kHalf; ++o)
                    row[o] =
                        by.scale[o] * static_cast<float>(static_cast<int32_t>(of[o] >> (4 * k) & 15u)) + by.start[o];
            }
        }
}

// first, second: Of 16 inputs each.
inline void decode_bytes(const Affine16& first, const Affine16& second, const char* codes, Block& to) {
    for (int word = 0; word < kBlockInputs / 2; ++word) {
        const Affine16& by = word < kHalf / 2 ? first : second;
        uint32_t of[kHalf / 2];  // both inputs of outputs o and o + 8
        for (int o = 0; o < kHalf / 2; ++o) of[o] = loaded<uint32_t>(codes, word * (kHalf / 2) + o);
        for (int own = 0; own < 2; ++own)
            for (int upper = 0; upper < 2; ++upper) {
                float* row = to[word * 2 + own] + upper * (kHalf / 2);
                const float *scale = by.scale + upper * (kHalf / 2), *start = by.start + upper * (kHalf / 2);
                const int left = 24 - 8 * (own * 2 + upper);
                for (int o = 0; o < kHalf / 2; ++o)
                    row[o] = scale[o] * static_cast<float>(static_cast<int32_t>(of[o] << left) >> 24) + start[o];
            }
    }
}

struct Int4 : Int4Layout {
    static void decode(const char* scales, int64_t input, const char* codes, Block& to) {
        scales = scales_of<Int4>(scales, input);
        Affine16 by;
        for (int o = 0; o < kHalf; ++o) {
            by.scale[o] = from_half(loaded<uint16_t>(scales, o));
            by.start[o] = -(by.scale[o] * from_half(loaded<uint16_t>(scales, kHalf + o)));  // exact
        }
        decode_nibbles(by, codes, to);
    }
};

struct Q41 : Q41Layout {
    static void decode(const char* scales, int64_t input, const char* codes, Block& to) {
        scales = scales_of<Q41>(scales, input);
        Affine16 by;
        for (int o = 0; o < kHalf; ++o) {
            by.scale[o] = from_half(loaded<uint16_t>(scales, o));
            by.start[o] = from_half(loaded<uint16_t>(scales, kHalf + o));
        }
        decode_nibbles(by, codes, to);
    }
};

struct Q80 : Q80Layout {
    static void decode(const char* scales, int64_t input, const char* codes, Block& to) {
        scales = scales_of<Q80>(scales, input);
        Affine16 by{};
        for (int o = 0; o < kHalf; ++o) by.scale[o] = from_half(loaded<uint16_t>(scales, o));
        decode_bytes(by, by, codes, to);
    }
};

// Scales of two levels; products of theirs are exact.
template <class Layout>
inline Affine16 of_levels(const char* scales, int64_t input) {
    scales = scales_of<Layout>(scales, input);
    const char* own = scales + 4 * kHalf + input % Layout::kGroup / kBlockInputs * 2 * kHalf;
    Affine16 by;
    for (int o = 0; o < kHalf; ++o) {
        by.scale[o] = from_half(loaded<uint16_t>(scales, o)) * static_cast<float>(loaded<uint8_t>(own, o));
        by.start[o] =
            -(from_half(loaded<uint16_t>(scales, kHalf + o)) * static_cast<float>(loaded<uint8_t>(own, kHalf + o)));
    }
    return by;
}

struct Q4K : Q4KLayout {
    static void decode(const char* scales, int64_t input, const char* codes, Block& to) {
        decode_nibbles(of_levels<Q4K>(scales, input), codes, to);
    }
};

struct Q5K : Q5KLayout {
    static void decode(const char* scales, int64_t input, const char* codes, Block& to) {
        const Affine16 by = of_levels<Q5K>(scales, input);
        decode_bytes(by, by, codes, to);
    }
};

// Scales of 16 inputs each.
inline void q6_k_scales(const char* scales, int64_t input, Affine16 (&by)[2]) {
    scales = scales_of<Q6KLayout>(scales, input);
    const char* own = scales + 2 * kHalf + input % Q6KLayout::kGroup / kHalf * kHalf;
    for (int group = 0; group < 2; ++group)
        for (int o = 0; o < kHalf; ++o) {
            const float whole = static_cast<float>(loaded<int8_t>(own, group * kHalf + o));
            by[group].scale[o] = from_half(loaded<uint16_t>(scales, o)) * whole;
            by[group].start[o] = 0.0f;
        }
}

struct Q6K : Q6KLayout {
    static void decode(const char* scales, int64_t input, const char* codes, Block& to) {
        Affine16 by[2];
        q6_k_scales(scales, input, by);
        decode_bytes(by[0], by[1], codes, to);
    }
};

struct Mxfp4 : Mxfp4Layout {
    static void decode(const char* scales, int64_t first, const char* codes, Block& to) {
        scales = scales_of<Mxfp4>(scales, first);
        for (int lane = 0; lane < 128; ++lane) {
            const int input = lane / 32 * 8 + lane % 2, o = lane / 2 % kHalf;
            const auto scale = bits<float>(static_cast<uint32_t>(loaded<uint8_t>(scales, o)) << 23);
            const uint32_t word = loaded<uint16_t>(codes, lane);
            for (int k = 0; k < 4; ++k) {
                const uint32_t code = word >> (4 * k) & 15u;
                const float magnitude = kE2m1[code & 7u] * scale;
                to[input + 2 * k][o] = code > 7 ? -magnitude : magnitude;
            }
        }
    }
};

struct Fp8 : Fp8Layout {
    static void decode(const char* scales, int64_t first, const char* codes, Block& to) {
        scales = scales_of<Fp8>(scales, first);
        for (int lane = 0; lane < 512; ++lane) {
            const int o = lane % 2 * 8 + lane / 4 % 8;
            const uint32_t code = loaded<uint8_t>(codes, lane);
            const float magnitude = bits<float>((code & 0x7fu) << 20) * 0x1p120f * loaded<float>(scales, o);
            to[lane / 32 * 2 + lane / 2 % 2][o] = (code & 0x80u) != 0 ? -magnitude : magnitude;
        }
    }
};

struct WordOfFloat32 {
    static constexpr int kInputs = 1;
    static uint32_t of(const Block& block, int input, int o) { return bits<uint32_t>(block[input][o]); }
};

struct WordOfBfloat16 {
    static constexpr int kInputs = 2;
    static uint32_t of(const Block& block, int input, int o) {
        return bits<uint32_t>(round_bf16(block[input][o])) >> 16 | bits<uint32_t>(round_bf16(block[input + 1][o]));
    }
};

// Writes the panel as `plain` weights have it.
template <class Form, class Word>
void expand(const char* panel, int64_t inputs, uint32_t* out) {
    std::memcpy(out, panel, kHeadBytes);
    out += kPanel;
    alignas(kLine) Block block;
    for (int half = 0; half < 2; ++half) {
        const char* scales = panel + kHeadBytes + half * half_bytes<Form>(inputs);
        const char* codes = scales + scale_bytes<Form>(inputs);
        for (int64_t first = 0; first < inputs; first += kBlockInputs, codes += Form::kBlockBytes) {
            Form::decode(scales, first, codes, block);
            uint32_t* to = out + first / Word::kInputs * kPanel + half * kHalf;
            for (int input = 0; input < kBlockInputs; input += Word::kInputs, to += kPanel)
                for (int o = 0; o < kHalf; ++o) to[o] = Word::of(block, input, o);
        }
    }
}

template <class Form>
constexpr FormKernels in_loops() {
    return {{expand<Form, WordOfFloat32>, expand<Form, WordOfBfloat16>}, {}, 0};
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
