// Weights in few bits, expanded to rows. Numbers are those that native/ops_cpu expands, bit for bit.
#pragma once
#include "../block.h"
#include "../weights_api.h"

namespace hpcdecode {

constexpr int kExpandOutputs = 16;  // of half a panel
constexpr int kExpandInputs = 16;   // of a thread, for one output: half a block
constexpr int kExpandBlocks = 8;    // of a warp

template <class T>
HPC_DEVICE T load_as(const uint8_t* p) {  // of aligned memory
    return *reinterpret_cast<const T*>(p);
}

// Half a panel as one thread reads it. Inputs are those of the thread, from 0 to 15.
struct HalfPanel {
    const uint8_t* scales;  // of the group of the inputs
    const uint8_t* codes;   // of their block
    int output;
    int part;              // of the block's two runs of inputs
    const float* numbers;  // of the form's table

    HPC_DEVICE float half(int row) const {
        return float_of_f16(load_as<uint16_t>(scales + (row * kExpandOutputs + output) * 2));
    }
    // Codes of 4 bits as int4 has them: 8 bytes for each thread, those of a warp side by side.
    HPC_DEVICE int nibble(int input) const {
        const auto word = load_as<uint32_t>(codes + (part * kExpandOutputs + output) * 8 + input % 2 * 4);
        return static_cast<int>(word >> (input / 2 * 4) & 15u);
    }
    HPC_DEVICE uint8_t byte(int input) const {
        const auto word = load_as<uint32_t>(codes + (part * 8 + input / 2) * 32 + output % 8 * 4);
        return static_cast<uint8_t>(word >> ((input % 2 * 2 + output / 8) * 8));
    }
};

// Codes of 4 bits, and of a byte.
struct Nibbles {
    HPC_DEVICE static float number(const HalfPanel& at, int input, float scale, float start) {
        return static_cast<float>(at.nibble(input)) * scale + start;
    }
};
struct Bytes {
    HPC_DEVICE static float number(const HalfPanel& at, int input, float scale, float start) {
        return static_cast<float>(static_cast<int8_t>(at.byte(input))) * scale + start;
    }
};

// Codes of 4 bits of a table.
struct TableNibbles {
    HPC_DEVICE static float start(const HalfPanel&, int64_t) { return 0.0f; }
    HPC_DEVICE static float number(const HalfPanel& at, int input, float scale, float) {
        return at.numbers[at.nibble(input)] * scale;
    }
};

// With scales of two levels, for `inputs` each.
template <class Layout, class Codes, int64_t inputs = ops::kBlockInputs>
struct Levels : Codes {
    HPC_DEVICE static const uint8_t* own(const HalfPanel& at, int64_t input) {
        const int64_t run = input % Layout::kGroup / inputs;
        return at.scales + (4 + 2 * run) * kExpandOutputs + at.output;
    }
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t input) {
        return at.half(0) * static_cast<float>(own(at, input)[0]);
    }
    HPC_DEVICE static float start(const HalfPanel& at, int64_t input) {
        return -(at.half(1) * static_cast<float>(own(at, input)[kExpandOutputs]));
    }
};

// With signed scales of two levels, for the 16 inputs of a thread, and without starts.
template <class Layout, class Codes>
struct SignedLevels : Codes {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t input) {
        const int64_t run = input % Layout::kGroup / kExpandInputs;
        const auto whole = static_cast<int8_t>(at.scales[(2 + run) * kExpandOutputs + at.output]);
        return at.half(0) * static_cast<float>(whole);
    }
    HPC_DEVICE static float start(const HalfPanel&, int64_t) { return 0.0f; }
};

// What the codes of a layout stand for. `scale` and `start` are read once for the inputs of a thread.
template <class Layout>
struct Form;

template <>
struct Form<ops::Int4Layout> : Nibbles {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return at.half(0); }
    HPC_DEVICE static float start(const HalfPanel& at, int64_t) { return -(at.half(0) * at.half(1)); }
};
template <>
struct Form<ops::Q41Layout> : Nibbles {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return at.half(0); }
    HPC_DEVICE static float start(const HalfPanel& at, int64_t) { return at.half(1); }
};
template <>
struct Form<ops::Q51Layout> : Bytes {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return at.half(0); }
    HPC_DEVICE static float start(const HalfPanel& at, int64_t) { return at.half(1); }
};
template <>
struct Form<ops::Q80Layout> : Bytes {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return at.half(0); }
    HPC_DEVICE static float start(const HalfPanel&, int64_t) { return 0.0f; }
};
template <>
struct Form<ops::Q4KLayout> : Levels<ops::Q4KLayout, Nibbles> {};
template <>
struct Form<ops::Q5KLayout> : Levels<ops::Q5KLayout, Bytes> {};
template <>
struct Form<ops::Q2KLayout> : Levels<ops::Q2KLayout, Nibbles, kExpandInputs> {};
template <>
struct Form<ops::Q3KLayout> : SignedLevels<ops::Q3KLayout, TableNibbles> {};
template <>
struct Form<ops::Iq4XsLayout> : SignedLevels<ops::Iq4XsLayout, TableNibbles> {};
template <>
struct Form<ops::Q6KLayout> : SignedLevels<ops::Q6KLayout, Bytes> {};
template <>
struct Form<ops::Iq4NlLayout> : TableNibbles {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return at.half(0); }
};
template <>
struct Form<ops::Nf4Layout> : TableNibbles {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return load_as<float>(at.scales + at.output * 4); }
};
template <>
struct Form<ops::Nvfp4Layout> : TableNibbles {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t input) {
        const int64_t run = input % ops::Nvfp4Layout::kGroup / kExpandInputs;
        const uint32_t fp8 = at.scales[(4 + run) * kExpandOutputs + at.output];
        const float size = as_float((fp8 & 127u) << 20) * as_float(239u << 23);  // 2^112
        const float whole = load_as<float>(at.scales + at.output * 4);
        return fp8 & 128u ? -(size * whole) : size * whole;
    }
};
template <>
struct Form<ops::I8Layout> : Bytes {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return load_as<float>(at.scales + at.output * 4); }
    HPC_DEVICE static float start(const HalfPanel&, int64_t) { return 0.0f; }
};
template <>
struct Form<ops::Mxfp4Layout> {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) {
        return as_float(static_cast<uint32_t>(at.scales[at.output]) << 23);
    }
    HPC_DEVICE static float start(const HalfPanel&, int64_t) { return 0.0f; }
    HPC_DEVICE static float number(const HalfPanel& at, int input, float scale, float) {
        const auto words = load_as<uint32_t>(at.codes + (at.part * 2 + input / 8) * 64 + at.output * 4);
        const int code = static_cast<int>(words >> (input % 2 * 16 + input % 8 / 2 * 4) & 15u), digits = code & 7;
        // 0, 0.5, 1, 1.5, 2, 3, 4, 6
        const float size =
            digits < 4 ? 0.5f * static_cast<float>(digits) : static_cast<float>((2 + digits % 2) << (digits / 2 - 2));
        return code & 8 ? -(size * scale) : size * scale;
    }
};
template <>
struct Form<ops::Fp8Layout> {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) { return load_as<float>(at.scales + at.output * 4); }
    HPC_DEVICE static float start(const HalfPanel&, int64_t) { return 0.0f; }
    HPC_DEVICE static float number(const HalfPanel& at, int input, float scale, float) {
        const uint32_t code = at.byte(input);
        const float size = as_float((code & 127u) << 20) * as_float(247u << 23) * scale;  // 2^120
        return code & 128u ? -size : size;
    }
};
template <>
struct Form<ops::Mxfp8Layout> : Form<ops::Fp8Layout> {
    HPC_DEVICE static float scale(const HalfPanel& at, int64_t) {
        return as_float(static_cast<uint32_t>(at.scales[at.output]) << 23);
    }
};

struct alignas(16) FourWords {
    uint32_t w[4];
};

// Stores 16 numbers, of which `to` is aligned to 16 bytes.
HPC_DEVICE void store_row(void* to, ActType type, const float* x) {
    auto* words = static_cast<FourWords*>(to);
    if (type == ActType::kBF16) {
        HPC_UNROLL
        for (int i = 0; i < 2; ++i) {
            FourWords four;
            HPC_UNROLL
            for (int j = 0; j < 4; ++j) four.w[j] = two_bf16(x[i * 8 + j * 2], x[i * 8 + j * 2 + 1]);
            words[i] = four;
        }
        return;
    }
    HPC_UNROLL
    for (int i = 0; i < 4; ++i) {
        FourWords four;
        HPC_UNROLL
        for (int j = 0; j < 4; ++j) four.w[j] = as_bits(x[i * 4 + j]);
        words[i] = four;
    }
}

// A warp expands a block of inputs of half a panel at a time. x: Half a panel; y: runs of kExpandBlocks blocks, of a
// warp each.
template <class Layout>
HPC_DEVICE void expand(Block& block, const ExpandArgs& a) {
    using Own = Form<Layout>;
    block.each([&](int t) {
        const int panel = block.x / 2, expert = panel / a.panels, lane = t % kWarp;
        const int output = lane % kExpandOutputs;
        const int row = (panel % a.panels * 2 + block.x % 2) * kExpandOutputs + output;
        if (row >= a.outputs) return;
        const uint8_t* half = a.packed + panel * a.panel_bytes + ops::kOutputs * 4 + block.x % 2 * a.half_bytes;
        const int64_t element = a.type == ActType::kBF16 ? 2 : 4;
        uint8_t* to =
            static_cast<uint8_t*>(a.out) + (static_cast<int64_t>(expert) * a.outputs + row) * a.inputs * element;
        HalfPanel at{half, half + a.scale_bytes, output, lane / kExpandOutputs, a.numbers};
        const int64_t first = (static_cast<int64_t>(block.y) * kWarps + t / kWarp) * kExpandBlocks;
        for (int64_t b = first; b < first + kExpandBlocks && b * ops::kBlockInputs < a.inputs; ++b) {
            const int64_t input = b * ops::kBlockInputs + at.part * kExpandInputs;
            at.scales = half + input / Layout::kGroup * Layout::kScaleBytes;
            at.codes = half + a.scale_bytes + b * Layout::kBlockBytes;
            const float scale = Own::scale(at, input), start = Own::start(at, input);
            float x[kExpandInputs];
            HPC_UNROLL
            for (int i = 0; i < kExpandInputs; ++i) x[i] = Own::number(at, i, scale, start);
            store_row(to + input * element, a.type, x);
        }
    });
}

inline int expand_runs(const ExpandArgs& a) {
    constexpr int64_t kInputs = ops::kBlockInputs * kExpandBlocks * kWarps;
    return static_cast<int>((a.inputs + kInputs - 1) / kInputs);
}

}  // namespace hpcdecode
