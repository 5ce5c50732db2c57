// Rows of K and V as codes of 6 and of 4 bits, with a scale and a middle for each token and head: code * scale +
// middle.
//
// A row of codes lies as products read it. 16 codes of 6 bits are 12 bytes: byte j < 8 has the low bits of dims j and
// j + 8, byte 8 + l the high bits of dims 2 l, 2 l + 8, 2 l + 1 and 2 l + 9, which lane l multiplies. 64 codes of 4
// bits are 32 bytes: byte j has dims j and j + 32, which one lane sums. Of the last dims of a row, if they are 32 or
// fewer, byte j < 16 has j and j + 16. A code is kept as what it is above the smallest one.
#pragma once
#include "numbers.h"

namespace hpcdecode {

// Returns the whole number in [low, high] that is nearest to x, as native/attn_cpu/kernels/storage.h has it.
HPC_DEVICE int code_of(float x, int low, int high) {
    const float bottom = static_cast<float>(low), top = static_cast<float>(high);
    const float above = x > bottom ? x : bottom, c = above < top ? above : top;
    return static_cast<int>(c + (c < 0.0f ? -0.5f : 0.5f));
}

// Returns two operands of bfloat16: codes in the low 6 bits of each half, less `offset`, if the other bits are those of
// 128. 128 + code has its bits in the last ones of a bfloat16 number.
template <int offset>
HPC_DEVICE uint32_t less(uint32_t codes) {
    constexpr uint32_t bits = 0x4300u + offset;
    return minus_bf16(codes, bits | bits << 16);
}

struct RowI6 {
    static constexpr bool kScaled = true, kMiddle = true, kChunks = false;
    static constexpr int kLow = -32, kHigh = 31, kLevels = kHigh - kLow, kGroup = 16, kGroupBytes = 12;

    HPC_DEVICE static uint32_t encode(float x) { return static_cast<uint32_t>(code_of(x, kLow, kHigh) - kLow); }
    HPC_DEVICE static int bytes(int padded) { return padded / kGroup * kGroupBytes; }

    // Returns byte i of a row; get(d) is dim d in units of the scale.
    template <class Get>
    HPC_DEVICE static uint8_t byte(Get&& get, int, int i) {
        const int d = i / kGroupBytes * kGroup, j = i % kGroupBytes, l = j - 8;
        const auto low = [&](int n) { return encode(get(d + n)) & 15u; };
        const auto high = [&](int n) { return encode(get(d + n)) >> 4; };
        if (j < 8) return static_cast<uint8_t>(low(j) | low(j + 8) << 4);
        return static_cast<uint8_t>(high(2 * l) | high(2 * l + 8) << 2 | high(2 * l + 1) << 4 | high(2 * l + 9) << 6);
    }

    static constexpr int kSpread = 1;
    HPC_DEVICE static int place(int d) { return d; }

    // Gives lane `lane` of 4 what it multiplies of dims k to k + 15 of a key: k + 2 lane, k + 2 lane + 8, and those
    // next to them.
    HPC_DEVICE static void keys(const uint8_t* row, int k, int lane, uint32_t* r, const Bits& of) {
        const uint8_t* group = row + k / kGroup * kGroupBytes;
        const uint32_t low = *reinterpret_cast<const uint16_t*>(group + lane * 2), high = group[8 + lane];
        const uint32_t lows = bytes_apart(low), highs = high * 0x00010010u;
        r[0] = less<-kLow>((highs & 0x00300030u) | ((lows & 0x000f000fu) | of.one));
        r[1] = less<-kLow>((highs >> 2 & 0x00300030u) | ((lows >> 4 & 0x000f000fu) | of.one));
    }
};

struct RowI4 {
    static constexpr bool kScaled = true, kMiddle = true;
    static constexpr int kLow = -8, kHigh = 7, kLevels = kHigh - kLow, kPart = 64, kPartBytes = 32;
    // Returns how far apart the dims of a byte lie, in part `part` of a row.
    HPC_DEVICE static int apart(int padded, int part) { return padded - part * kPart > kPart / 2 ? 32 : 16; }

    HPC_DEVICE static uint32_t encode(float x) { return static_cast<uint32_t>(code_of(x, kLow, kHigh) - kLow); }
    HPC_DEVICE static int bytes(int padded) {
        const int rest = padded % kPart;
        return padded / kPart * kPartBytes + (rest == 0 ? 0 : apart(rest, 0));
    }

    // As RowI6::byte.
    template <class Get>
    HPC_DEVICE static uint8_t byte(Get&& get, int padded, int i) {
        const int part = i / kPartBytes, d = part * kPart + i % kPartBytes;
        return static_cast<uint8_t>(encode(get(d)) | encode(get(d + apart(padded, part))) << 4);
    }

    static constexpr int kSpread = 4;
    HPC_DEVICE static void spread(uint32_t r, uint32_t* out, const Bits& of) {
        HPC_UNROLL
        for (int i = 0; i < kSpread; ++i) out[i] = less<-kLow>((r >> 4 * i & 0x000f000fu) | of.one);
    }
    HPC_DEVICE static int dim_of(int padded, int chunk, int tile, int column) {
        const int part = chunk / 2;
        return part * kPart + chunk % 2 * 16 + column * 2 + tile / 2 + tile % 2 * apart(padded, part);
    }
};

// How K and V are kept where they differ.
template <class KRow, class VRow>
struct NumCodes {
    using K = KRow;
    using V = VRow;
    using Product = Bf16Product;
    static constexpr bool kScaled = true, kTensor = true;
};
using NumK8V4 = NumCodes<NumI8, RowI4>;
using NumI4 = NumCodes<RowI6, RowI4>;

}  // namespace hpcdecode
