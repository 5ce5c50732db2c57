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

struct Int4 : Int4Layout {
    static void decode(const char* scales, const char* codes, Block& to) {
        float scale[kHalf], start[kHalf];
        for (int o = 0; o < kHalf; ++o) {
            scale[o] = from_half(loaded<uint16_t>(scales, o));
            start[o] = -(scale[o] * from_half(loaded<uint16_t>(scales, kHalf + o)));  // exact
        }
        for (int lane = 0; lane < 64; ++lane) {
            const int input = lane / 32 * 16 + lane % 2, o = lane / 2 % kHalf;
            const auto word = loaded<uint32_t>(codes, lane);
            for (int k = 0; k < 8; ++k)
                to[input + 2 * k][o] = scale[o] * static_cast<float>(word >> (4 * k) & 15u) + start[o];
        }
    }
};

struct Mxfp4 : Mxfp4Layout {
    static void decode(const char* scales, const char* codes, Block& to) {
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
    static void decode(const char* scales, const char* codes, Block& to) {
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
            Form::decode(scales + first / Form::kGroup * Form::kScaleBytes, codes, block);
            uint32_t* to = out + first / Word::kInputs * kPanel + half * kHalf;
            for (int input = 0; input < kBlockInputs; input += Word::kInputs, to += kPanel)
                for (int o = 0; o < kHalf; ++o) to[o] = Word::of(block, input, o);
        }
    }
}

template <class Form>
constexpr FormKernels in_loops() {
    return {{expand<Form, WordOfFloat32>, expand<Form, WordOfBfloat16>}, nullptr, 0};
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
