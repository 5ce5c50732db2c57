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
        for (int i = 0; i < 64; ++i) to.code<Nf4>(byte(from, 4 + i / 2) >> (i % 2 == 0 ? 4 : 0) & 15, i);
    }
};

struct Nvfp4 : Nvfp4Layout {
    static constexpr int64_t kBytes = 22, kInputs = 32;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from) * 256);
        for (int i = 0; i < 2; ++i) to.byte_at((4 + to.first / 16 + i) * kHalf, byte(from, 4 + i));
        for (int i = 0; i < 32; ++i) to.code<Nvfp4>(byte(from, 6 + i / 2) >> (i % 2 * 4) & 15, i);
    }
};

// A float32 scale, then codes of a byte.
template <class Layout>
struct ScaledBytes : Layout {
    static constexpr int64_t kBytes = 36, kInputs = 32;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from));
        for (int i = 0; i < 32; ++i) to.code<Layout>(byte(from, 4 + i), i);
    }
};
using I8 = ScaledBytes<I8Layout>;
using F8 = ScaledBytes<Fp8Layout>;

struct I4 : Int4Layout {
    static constexpr int64_t kBytes = 20;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        for (int i = 0; i < 32; ++i) to.code<I4>(byte(from, 4 + i / 2) >> (i % 2 * 4) & 15, i);
    }
};

// Stores an exponent within the range of a form, and returns the power of two by which codes change.
template <class Layout>
float put_exponent(int exponent, const Place& to) {
    const int own = std::min(std::max(exponent, Layout::kLeast), Layout::kMost);
    to.byte_at(0, static_cast<uint8_t>(own));
    return std::ldexp(1.0f, exponent - own);
}

// of(from, i): Code i of the codes from there on.
template <class Block, class Of>
void put_fp4(const char* from, const Place& to, const Of& of) {
    const float by = put_exponent<Mxfp4Layout>(byte(from, 0), to);
    for (int i = 0; i < 32; ++i) {
        const int code = of(from + 1, i);
        to.code<Block>(by == 1 ? static_cast<uint8_t>(code) : to_fp4(kFp4[code] * by), i);
    }
}

struct Mxfp4 : Mxfp4Layout {
    static constexpr int64_t kBytes = 17;
    static void pack(const char* from, const Place& to) {
        put_fp4<Mxfp4>(from, to, [](const char* codes, int i) { return byte(codes, i % 16) >> (i / 16 * 4) & 15; });
    }
};

struct Mx4 : Mxfp4Layout {
    static constexpr int64_t kBytes = 17;
    static void pack(const char* from, const Place& to) {
        put_fp4<Mx4>(from, to, [](const char* codes, int i) { return byte(codes, i / 2) >> (i % 2 * 4) & 15; });
    }
};

struct Mx8 : Mxfp8Layout {
    static constexpr int64_t kBytes = 33;
    static void pack(const char* from, const Place& to) {
        const float by = put_exponent<Mxfp8Layout>(byte(from, 0), to);
        for (int i = 0; i < 32; ++i) {
            const uint8_t code = byte(from, 1 + i);
            to.code<Mx8>(by == 1 ? code : to_fp8(std::min(std::max(from_fp8(code) * by, -448.0f), 448.0f)), i);
        }
    }
};

}  // namespace hpcdecode::ops
