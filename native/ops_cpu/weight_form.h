// Forms of packed weights that take fewer bits than activations, and how a panel holds them.
//
// bf16 and f16 (float16) are for activations of float32: their panels are as that of bfloat16 activations. Any other
// panel begins with what its sums begin with, 32 float32. Two halves of 16 outputs follow. A half has the scales of all
// groups of inputs, up to a multiple of 64 bytes, then the codes of 32 inputs at a time.
#pragma once
#include <cstdint>

namespace hpcdecode::ops {

enum class WeightForm : int {
    plain,
    int4,
    mxfp4,
    fp8,
    q4_1,
    q8_0,
    q4_k,
    q5_k,
    q6_k,
    bf16,
    f16,
    nf4,
    nvfp4,
    i8,
    q2_k,
    q3_k,
    iq4_nl,
    iq4_xs,
    mxfp8,
    q5_1
};
constexpr int kForms = 20;
constexpr int64_t kBlockInputs = 32;  // inputs must be a multiple
constexpr int64_t kOutputs = 32;      // of a panel

// (code - zero) * scale, codes from 0 to 15. Of a group of inputs: float16 scales [16], float16 zeros [16].
// Codes: [2 blocks of 8 words][2 blocks of 8 outputs][8 outputs][input of the word] of 4 bytes, 4 bits a word.
struct Int4Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 64, kBlockBytes = 256;
};

// FP4 (E2M1) times a power of two (OCP Microscaling). Of a group of inputs: exponents + 127, bytes [16], from kLeast to
// kMost. Codes: [4 blocks of 4 words][16 outputs][input of the word] of 2 bytes, 4 bits a word.
struct Mxfp4Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 16, kBlockBytes = 256;
    static constexpr int kLeast = 2, kMost = 252;
};

// FP8 (E4M3) times a scale. Of a group of inputs: float32 scales [16].
// Codes: [16 words][8 outputs][input of the word][2 blocks of 8 outputs].
struct Fp8Layout {
    static constexpr int64_t kGroup = 128, kScaleBytes = 64, kBlockBytes = 512;
};

// FP8 (E4M3) times a power of two (OCP Microscaling). Of a group of inputs: exponents + 127, bytes [16], from kLeast
// to kMost. Codes lie as fp8's.
struct Mxfp8Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 16, kBlockBytes = 512;
    static constexpr int kLeast = 10, kMost = 134;
};

// The forms below hold the numbers of GGUF's blocks (ggml) exactly. Codes of 4 bits lie as int4's, those of a byte as
// fp8's. code * scale + offset. Of a group of inputs: float16 scales [16], float16 offsets [16].
struct Q41Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 64, kBlockBytes = 256;
};
struct Q51Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 64, kBlockBytes = 512;
};

// int8 * scale. Of a group of inputs: float16 scales [16].
struct Q80Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 32, kBlockBytes = 512;
};

// code * (scale * whole) - (least * whole). Of a group of inputs: float16 [16] for scales, float16 [16] for what is
// taken away; then of every 32 inputs: bytes scale [16], bytes least [16].
struct Q4KLayout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 320, kBlockBytes = 256;
};
struct Q5KLayout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 320, kBlockBytes = 512;
};

// int8 * (scale * whole). Of a group of inputs: float16 scales [16]; then of every 16 inputs: int8 whole [16].
struct Q6KLayout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 288, kBlockBytes = 512;
};

// code * (scale * whole) - (least * whole). Of a group of inputs: float16 [16] for scales, float16 [16] for what is
// taken away; then of every 16 inputs: bytes scale [16], bytes least [16]. Codes lie as int4's.
struct Q2KLayout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 576, kBlockBytes = 256;
};

// The codes of the forms below stand for numbers of a table, but for i8's. Those of 4 bits lie as int4's.

// Number * (scale * whole). Scales as those of q6_k.
struct Q3KLayout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 288, kBlockBytes = 256;
};
struct Iq4XsLayout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 288, kBlockBytes = 256;
};

// Number * scale. Of a group of inputs: float16 scales [16].
struct Iq4NlLayout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 32, kBlockBytes = 256;
};

// Number * scale. Of a group of inputs: float32 scales [16].
struct Nf4Layout {
    static constexpr int64_t kGroup = 64, kScaleBytes = 64, kBlockBytes = 256;
};

// FP4 (E2M1) * (scale * whole). Of a group of inputs: float32 [16] for whole, times 256; then of every 16 inputs: FP8
// (E4M3) scale [16].
struct Nvfp4Layout {
    static constexpr int64_t kGroup = 256, kScaleBytes = 320, kBlockBytes = 256;
};

// int8 * scale. Of a group of inputs: float32 scales [16]. Codes lie as fp8's.
struct I8Layout {
    static constexpr int64_t kGroup = 128, kScaleBytes = 64, kBlockBytes = 512;
};

// What codes stand for: NormalFloat4 (QLoRA, arXiv:2305.14314, appendix E), FP4, and numbers of GGUF (ggml).
inline constexpr float kNf4[16] = {-1.0f,
                                   -0.6961928009986877f,
                                   -0.5250730514526367f,
                                   -0.39491748809814453f,
                                   -0.28444138169288635f,
                                   -0.18477343022823334f,
                                   -0.09105003625154495f,
                                   0.0f,
                                   0.07958029955625534f,
                                   0.16093020141124725f,
                                   0.24611230194568634f,
                                   0.33791524171829224f,
                                   0.44070982933044434f,
                                   0.5626170039176941f,
                                   0.7229568362236023f,
                                   1.0f};
inline constexpr float kFp4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
inline constexpr float kQ3[16] = {-4, -3, -2, -1, 0, 1, 2, 3};
inline constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Returns the numbers that a form's codes stand for, or null if it has no table.
constexpr const float* numbers_of(WeightForm form) {
    switch (form) {
        case WeightForm::nf4:
            return kNf4;
        case WeightForm::nvfp4:
            return kFp4;
        case WeightForm::q3_k:
            return kQ3;
        case WeightForm::iq4_nl:
        case WeightForm::iq4_xs:
            return kIq4;
        default:
            return nullptr;
    }
}

// Returns the bytes of a half's scales.
template <class Layout>
constexpr int64_t scale_bytes(int64_t inputs) {
    return ((inputs + Layout::kGroup - 1) / Layout::kGroup * Layout::kScaleBytes + 63) / 64 * 64;
}

template <class Layout>
constexpr int64_t half_bytes(int64_t inputs) {
    return scale_bytes<Layout>(inputs) + inputs / kBlockInputs * Layout::kBlockBytes;
}

// Calls f with the layout of a form, and returns true; false if panels of the form are not of two halves.
template <class F>
constexpr bool with_layout(WeightForm form, F&& f) {
    switch (form) {
        case WeightForm::int4:
            return f(Int4Layout{}), true;
        case WeightForm::mxfp4:
            return f(Mxfp4Layout{}), true;
        case WeightForm::fp8:
            return f(Fp8Layout{}), true;
        case WeightForm::q4_1:
            return f(Q41Layout{}), true;
        case WeightForm::q8_0:
            return f(Q80Layout{}), true;
        case WeightForm::q4_k:
            return f(Q4KLayout{}), true;
        case WeightForm::q5_k:
            return f(Q5KLayout{}), true;
        case WeightForm::q6_k:
            return f(Q6KLayout{}), true;
        case WeightForm::q2_k:
            return f(Q2KLayout{}), true;
        case WeightForm::q3_k:
            return f(Q3KLayout{}), true;
        case WeightForm::iq4_nl:
            return f(Iq4NlLayout{}), true;
        case WeightForm::iq4_xs:
            return f(Iq4XsLayout{}), true;
        case WeightForm::nf4:
            return f(Nf4Layout{}), true;
        case WeightForm::nvfp4:
            return f(Nvfp4Layout{}), true;
        case WeightForm::i8:
            return f(I8Layout{}), true;
        case WeightForm::mxfp8:
            return f(Mxfp8Layout{}), true;
        case WeightForm::q5_1:
            return f(Q51Layout{}), true;
        case WeightForm::plain:
        case WeightForm::bf16:
        case WeightForm::f16:
            break;
    }
    return false;
}

// Returns the bytes of both halves of a panel in one of the forms but `plain`.
constexpr int64_t packed_bytes(WeightForm form, int64_t inputs) {
    int64_t bytes = form == WeightForm::plain ? 0 : kOutputs * inputs * 2;
    with_layout(form, [&](auto layout) { bytes = 2 * half_bytes<decltype(layout)>(inputs); });
    return bytes;
}

// Returns what the inputs of a weight must be a multiple of.
constexpr int64_t inputs_multiple(WeightForm form) {
    switch (form) {
        case WeightForm::plain:
            return 1;
        case WeightForm::nf4:
            return Nf4Layout::kGroup;
        case WeightForm::q2_k:
        case WeightForm::q3_k:
        case WeightForm::q4_k:
        case WeightForm::q5_k:
        case WeightForm::q6_k:
        case WeightForm::iq4_xs:
            return Q4KLayout::kGroup;
        default:
            return kBlockInputs;
    }
}

}  // namespace hpcdecode::ops
