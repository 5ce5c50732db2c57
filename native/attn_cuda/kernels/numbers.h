// The layout of every KV type in shared memory, and its operands of products.
#pragma once
#include "../block.h"
#include "../kernel_api.h"

namespace hpcdecode {

HPC_DEVICE float load_act(const void* p, ActType type, int64_t i) {
    return type == ActType::kF32 ? static_cast<const float*>(p)[i] : float_of_bf16(static_cast<const uint16_t*>(p)[i]);
}
HPC_DEVICE void store_act(void* p, ActType type, int64_t i, float x) {
    if (type == ActType::kF32) {
        static_cast<float*>(p)[i] = x;
    } else {
        static_cast<uint16_t*>(p)[i] = bf16_of(x);
    }
}

// The operands of products of 16 bits. A float is the sum of two operands, `high` and the rest, so that queries and
// weights keep 16 bits or more.
struct Bf16Product {
    static constexpr bool kHalf = false;
    HPC_DEVICE static uint16_t of(float x) { return bf16_of(x); }
    HPC_DEVICE static float up(uint16_t h) { return float_of_bf16(h); }
};
struct F16Product {
    static constexpr bool kHalf = true;
    HPC_DEVICE static uint16_t of(float x) {
        const float most = 65504.0f;
        return f16_of(x > most ? most : x < -most ? -most : x);
    }
    HPC_DEVICE static float up(uint16_t h) { return float_of_f16(h); }
};

// Rows that have one element after the other, and their operands (mma.h has their order).
template <class Self, class E>
struct ElementRow {
    using K = Self;
    using V = Self;
    using Elem = E;
    static constexpr bool kMiddle = false;
    struct Held {};
    // Gives lane `lane` of 4 what it multiplies of dims k to k + 15 of a key.
    HPC_DEVICE static void keys(const uint8_t* row, int k, int lane, uint32_t* r) {
        const E* p = reinterpret_cast<const E*>(row) + k + lane * 2;
        r[0] = Self::two(p);
        r[1] = Self::two(p + 8);
    }
    // Gives a lane dim `dim` of the values of tokens 0, 1, 8 and 9 from `row` on. n: of the columns that it sums; a row
    // of codes keeps for the odd ones what it reads for the even ones. padded: dims of a row.
    HPC_DEVICE static void values(const uint8_t* row, int stride, int, int, int dim, Held&, uint32_t* r) {
        const auto at = [&](int token) { return reinterpret_cast<const E*>(row + token * stride)[dim]; };
        r[0] = Self::two(at(0), at(1));
        r[1] = Self::two(at(8), at(9));
    }
};

struct NumF32 : ElementRow<NumF32, float> {
    static constexpr bool kScaled = false, kTensor = false;
    HPC_DEVICE static Elem encode(float x) { return x; }
};

template <class P, class Self>
struct Num16 : ElementRow<Self, uint16_t> {
    using Elem = uint16_t;
    using Product = P;
    static constexpr bool kScaled = false, kTensor = true;
    HPC_DEVICE static uint32_t two(const Elem* p) { return *reinterpret_cast<const uint32_t*>(p); }
    HPC_DEVICE static uint32_t two(Elem a, Elem b) { return pair(a, b); }
};
struct NumBF16 : Num16<Bf16Product, NumBF16> {
    HPC_DEVICE static Elem encode(float x) { return bf16_of(x); }
};
struct NumF16 : Num16<F16Product, NumF16> {
    HPC_DEVICE static Elem encode(float x) { return f16_of(x); }
};

struct NumI8 : ElementRow<NumI8, uint8_t> {
    using Product = Bf16Product;
    static constexpr bool kScaled = true, kTensor = true;
    static constexpr int kLevels = 127;
    HPC_DEVICE static Elem encode(float x) {
        const float c = x > kLevels ? kLevels : x < -kLevels ? -kLevels : x;
        return static_cast<Elem>(static_cast<int>(c + (c < 0 ? -0.5f : 0.5f)) + 128);
    }
    // 2^23 + code + 128 is a float whose last bits are the byte; integers below 256 are exact in bfloat16.
    HPC_DEVICE static uint32_t bits(uint32_t byte) { return as_bits(as_float(0x4b000000u | byte) - 8388736.0f); }
    HPC_DEVICE static uint32_t two(uint32_t a, uint32_t b) { return bits(a) >> 16 | (bits(b) & 0xffff0000u); }
    HPC_DEVICE static uint32_t two(const Elem* p) {
        const uint32_t both = *reinterpret_cast<const uint16_t*>(p);
        return two(both & 255u, both >> 8);
    }
    HPC_DEVICE static int bytes(int padded) { return padded; }
    template <class Get>
    HPC_DEVICE static uint8_t byte(Get&& get, int, int i) {
        return encode(get(i));
    }
};

}  // namespace hpcdecode
