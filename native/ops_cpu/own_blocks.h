// Blocks of our own, for the weights of checkpoints in other formats than GGUF: blocks.h describes them. Each type
// packs one block: a group of the form that it becomes, or kInputs of one.
#pragma once
#include <algorithm>
#include <cmath>

#include "block_place.h"
#include "rounding.h"

namespace hpcdecode::ops {

inline float float_at(const char* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

struct Nf4 : Nf4Layout {
    static constexpr int64_t kBytes = 36;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from));
        uint8_t codes[64];
        for (int i = 0; i < 32; ++i) codes[2 * i] = byte(from, 4 + i) >> 4, codes[2 * i + 1] = byte(from, 4 + i) & 15;
        to.store<Nf4>(codes, sizeof codes);
    }
};

struct Nvfp4 : Nvfp4Layout {
    static constexpr int64_t kBytes = 22, kInputs = 32;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from) * 256);
        for (int i = 0; i < 2; ++i) to.byte_at((4 + to.first / 16 + i) * kHalf, byte(from, 4 + i));
        uint8_t codes[32];
        take_neighbours(from + 6, codes);
        to.store<Nvfp4>(codes, sizeof codes);
    }
};

// A float32 scale, then codes of a byte.
template <class Layout>
struct ScaledBytes : Layout {
    static constexpr int64_t kBytes = 36, kInputs = 32;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from));
        uint8_t codes[32];
        std::memcpy(codes, from + 4, sizeof codes);
        to.store<Layout>(codes, sizeof codes);
    }
};
using I8 = ScaledBytes<I8Layout>;
using F8 = ScaledBytes<Fp8Layout>;

struct I4 : Int4Layout {
    static constexpr int64_t kBytes = 20;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        uint8_t codes[32];
        take_neighbours(from + 4, codes);
        to.store<I4>(codes, sizeof codes);
    }
};

// Stores an exponent within the range of a form, and returns the power of two by which codes change.
template <class Layout>
float put_exponent(int exponent, const Place& to) {
    const int own = std::min(std::max(exponent, Layout::kLeast), Layout::kMost);
    to.byte_at(0, static_cast<uint8_t>(own));
    return own == exponent ? 1.0f : std::ldexp(1.0f, exponent - own);
}

// take: Takes the codes from the bytes that follow on the exponent.
template <void (*take)(const char* from, uint8_t* codes)>
struct ExponentAndFp4 : Mxfp4Layout {
    static constexpr int64_t kBytes = 17;
    static void pack(const char* from, const Place& to) {
        const float by = put_exponent<Mxfp4Layout>(byte(from, 0), to);
        uint8_t codes[32];
        take(from + 1, codes);
        if (by != 1)
            for (uint8_t& code : codes) code = to_fp4(kFp4[code] * by);
        to.store<Mxfp4Layout>(codes, sizeof codes);
    }
};
using Mxfp4 = ExponentAndFp4<take_halves>;
using Mx4 = ExponentAndFp4<take_neighbours>;

struct Mx8 : Mxfp8Layout {
    static constexpr int64_t kBytes = 33;
    static void pack(const char* from, const Place& to) {
        const float by = put_exponent<Mxfp8Layout>(byte(from, 0), to);
        uint8_t codes[32];
        std::memcpy(codes, from + 1, sizeof codes);
        if (by != 1)
            for (uint8_t& code : codes) code = to_fp8(std::min(std::max(from_fp8(code) * by, -448.0f), 448.0f));
        to.store<Mx8>(codes, sizeof codes);
    }
};

}  // namespace hpcdecode::ops
