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

static_assert(kWarps * 8 == 32, "a lane's dims of V lie 32 apart");

// Returns the whole number in [low, high] that is nearest to x, as native/attn_cpu/kernels/storage.h has it.
HPC_DEVICE int code_of(float x, int low, int high) {
    const float bottom = static_cast<float>(low), top = static_cast<float>(high);
    const float above = x > bottom ? x : bottom, c = above < top ? above : top;
    return static_cast<int>(c + (c < 0.0f ? -0.5f : 0.5f));
}

// Returns two operands of bfloat16: codes in the low 6 bits of each half, less `offset`. 128 + code has its bits in the
// last ones of a bfloat16 number.
template <int offset>
HPC_DEVICE uint32_t two_codes(uint32_t codes) {
    constexpr uint32_t less = 0x4300u + offset;
    return minus_bf16(codes | 0x43004300u, less | less << 16);
}

struct RowI6 {
    static constexpr bool kScaled = true, kMiddle = true;
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

    // As ElementRow::keys.
    HPC_DEVICE static void keys(const uint8_t* row, int k, int lane, uint32_t* r) {
        const uint8_t* group = row + k / kGroup * kGroupBytes;
        const uint32_t low = *reinterpret_cast<const uint16_t*>(group + lane * 2), high = group[8 + lane];
        const uint32_t lows = low | low << 8, highs = high << 4 | high << 16;
        r[0] = two_codes<-kLow>((lows & 0x000f000fu) | (highs & 0x00300030u));
        r[1] = two_codes<-kLow>((lows >> 4 & 0x000f000fu) | (highs >> 2 & 0x00300030u));
    }
};

struct RowI4 {
    static constexpr bool kScaled = true, kMiddle = true;
    static constexpr int kLow = -8, kHigh = 7, kLevels = kHigh - kLow, kPart = 64, kPartBytes = 32;
    struct Held {
        uint32_t codes[2];  // of two tokens each, one in either half; 4 bits of a dim, and 4 of the one 32 above it
    };

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

    // As ElementRow::values. Column n + 1 is 32 dims above column n.
    HPC_DEVICE static void values(const uint8_t* row, int stride, int padded, int n, int dim, Held& held, uint32_t* r) {
        HPC_UNROLL
        for (int i = 0; i < 2; ++i) {
            if (n % 2 == 0) {
                const int part = dim / kPart, between = apart(padded, part), d = dim % kPart;
                const uint8_t* at = row + i * 8 * stride + part * kPartBytes + d % between;
                held.codes[i] = (at[0] | static_cast<uint32_t>(at[stride]) << 16) >> d / between * 4;
            } else {
                held.codes[i] >>= 4;
            }
            r[i] = two_codes<-kLow>(held.codes[i] & 0x000f000fu);
        }
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
