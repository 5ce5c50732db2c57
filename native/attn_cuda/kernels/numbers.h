// The layout of every KV type in shared memory, and its operands of products.
#pragma once
#include "../block.h"
#include "../kernel_api.h"

namespace hpcdecode {

constexpr float kLog2E = 1.4426950408889634f;

struct alignas(16) FourFloats {
    float v[4];
};

// Returns the bytes from row to row in shared memory: an odd number of 16, so that eight rows lie in different banks.
HPC_BOTH int stride_of(int row) { return (row / 16 | 1) * 16; }

// Returns a score, scaled already, in units of which weights are powers of 2.
HPC_DEVICE float log2_score(const LayerArgs& layer, float x) {
    if (layer.softcap > 0.0f) x = layer.softcap * tanhf(x / layer.softcap);
    return x * kLog2E;
}

// Returns the first column of a query head: number `head` of the group of a KV head.
HPC_DEVICE int query_column(const AttendArgs& a, int kv_head, int head) {
    return (kv_head * a.layer.group + head) * a.layer.head.k_dim;
}

// Returns the partial result of a row, by the block whose work it is.
HPC_DEVICE float* partial_of(const AttendArgs& a, const Block& block, int row) {
    const int64_t head = static_cast<int64_t>(block.x) * a.layer.heads + block.y;
    return a.partials + (head * kRows + row) * (2 + a.layer.head.v_pad);
}

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
    HPC_DEVICE static uint32_t two(float x, float y) { return two_bf16(x, y); }
};
struct F16Product {
    static constexpr bool kHalf = true;
    HPC_DEVICE static uint16_t of(float x) {
        const float most = 65504.0f;
        return f16_of(x > most ? most : x < -most ? -most : x);
    }
    HPC_DEVICE static float up(uint16_t h) { return float_of_f16(h); }
    HPC_DEVICE static uint32_t two(float x, float y) { return two_f16(x, y); }  // of at most 65504
};

// The bits of 128 and of 256 as bfloat16 numbers, twice each, which codes become operands by.
struct Bits {
    uint32_t one, other;

    HPC_DEVICE void take() {
        one = in_register(0x43004300u);
        other = in_register(0x43804380u);
    }
};

// Rows are read in chunks of 16 bytes. A lane has a part of a chunk in its turn (matrices.h): a register of bits, which
// `spread` makes kSpread registers of two operands each.
//   of K: of one token, the operands in the order of `place`
//   of V: of two tokens, each register of one dim, `dim_of`
template <class Self, class E>
struct ElementRow {
    using K = Self;
    using V = Self;
    using Elem = E;
    static constexpr bool kMiddle = false, kChunks = true;
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
    static constexpr int kSpread = 1;
    HPC_DEVICE static void spread(uint32_t r, uint32_t* out, const Bits&) { out[0] = r; }
    HPC_DEVICE static int place(int d) { return d; }
    HPC_DEVICE static int dim_of(int, int chunk, int, int column) { return chunk * 8 + column; }
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

    static constexpr int kSpread = 2;
    // Of every second byte the operand of its code. 128 + 7 bits are the last ones of a bfloat16 number, from which 128
    // is taken if the eighth bit is set, else 256.
    HPC_DEVICE static uint32_t every_second(uint32_t bytes, const Bits& of) {
        return minus_bf16((bytes & 0x007f007fu) | of.one, (bytes & 0x00800080u) ^ of.other);
    }
    HPC_DEVICE static void spread(uint32_t r, uint32_t* out, const Bits& of) {
        out[0] = every_second(r, of);
        out[1] = every_second(r >> 8, of);
    }
    // Lane l has bytes 4 l to 4 l + 3 of 16: of them 0 and 2, then 1 and 3.
    HPC_DEVICE static int place(int d) { return d / 16 * 16 + d % 2 * 8 + d / 4 % 4 * 2 + d / 2 % 2; }
    HPC_DEVICE static int dim_of(int, int chunk, int tile, int column) { return chunk * 16 + column * 2 + tile; }

    HPC_DEVICE static int bytes(int padded) { return padded; }
    template <class Get>
    HPC_DEVICE static uint8_t byte(Get&& get, int, int i) {
        return encode(get(i));
    }
};

}  // namespace hpcdecode
