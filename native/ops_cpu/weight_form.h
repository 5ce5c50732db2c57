// Forms of packed weights that take fewer bits than activations, and how a panel holds them.
//
// bf16 and f16 (float16) are for activations of float32: their panels are as that of bfloat16 activations. Any other
// panel begins with what its sums begin with, 32 float32. Two halves of 16 outputs follow. A half has the scales of all
// groups of inputs, up to a multiple of 64 bytes, then the codes of 32 inputs at a time.
#pragma once
#include <cstdint>

namespace hpcdecode::ops {

enum class WeightForm : int { plain, int4, mxfp4, fp8, q4_1, q8_0, q4_k, q5_k, q6_k, bf16, f16 };
constexpr int kForms = 11;
constexpr int64_t kBlockInputs = 32;  // inputs must be a multiple
constexpr int64_t kOutputs = 32;      // of a panel

// (code - zero) * scale, codes from 0 to 15. Of a group of inputs: float16 scales [16], float16 zeros [16].
// Codes: [2 blocks of 8 words][2 blocks of 8 outputs][8 outputs][input of the word] of 4 bytes, 4 bits a word.
struct Int4Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 64, kBlockBytes = 256;
};

// FP4 (E2M1) times a power of two (OCP Microscaling). Of a group of inputs: exponents + 127, bytes [16], from 2 to 252.
// Codes: [4 blocks of 4 words][16 outputs][input of the word] of 2 bytes, 4 bits a word.
struct Mxfp4Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 16, kBlockBytes = 256;
};

// FP8 (E4M3) times a scale. Of a group of inputs: float32 scales [16].
// Codes: [16 words][8 outputs][input of the word][2 blocks of 8 outputs].
struct Fp8Layout {
    static constexpr int64_t kGroup = 128, kScaleBytes = 64, kBlockBytes = 512;
};

// The forms below hold the numbers of GGUF's blocks (ggml) exactly. Codes of 4 bits lie as int4's, those of a byte as
// fp8's. code * scale + offset. Of a group of inputs: float16 scales [16], float16 offsets [16].
struct Q41Layout {
    static constexpr int64_t kGroup = 32, kScaleBytes = 64, kBlockBytes = 256;
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

// Returns the bytes of a half's scales.
template <class Layout>
constexpr int64_t scale_bytes(int64_t inputs) {
    return ((inputs + Layout::kGroup - 1) / Layout::kGroup * Layout::kScaleBytes + 63) / 64 * 64;
}

template <class Layout>
constexpr int64_t half_bytes(int64_t inputs) {
    return scale_bytes<Layout>(inputs) + inputs / kBlockInputs * Layout::kBlockBytes;
}

// Returns the bytes of both halves of a panel in one of the forms but `plain`.
constexpr int64_t packed_bytes(WeightForm form, int64_t inputs) {
    switch (form) {
        case WeightForm::int4:
            return 2 * half_bytes<Int4Layout>(inputs);
        case WeightForm::mxfp4:
            return 2 * half_bytes<Mxfp4Layout>(inputs);
        case WeightForm::fp8:
            return 2 * half_bytes<Fp8Layout>(inputs);
        case WeightForm::q4_1:
            return 2 * half_bytes<Q41Layout>(inputs);
        case WeightForm::q8_0:
            return 2 * half_bytes<Q80Layout>(inputs);
        case WeightForm::q4_k:
            return 2 * half_bytes<Q4KLayout>(inputs);
        case WeightForm::q5_k:
            return 2 * half_bytes<Q5KLayout>(inputs);
        case WeightForm::q6_k:
            return 2 * half_bytes<Q6KLayout>(inputs);
        case WeightForm::bf16:
        case WeightForm::f16:
            return kOutputs * inputs * 2;
        case WeightForm::plain:
            break;
    }
    return 0;
}

// Returns what the inputs of a weight must be a multiple of.
constexpr int64_t inputs_multiple(WeightForm form) {
    if (form == WeightForm::plain) return 1;
    return form >= WeightForm::q4_k && form <= WeightForm::q6_k ? Q4KLayout::kGroup : kBlockInputs;
}

}  // namespace hpcdecode::ops
