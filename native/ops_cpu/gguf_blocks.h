// The blocks of GGUF files. Each type packs one block: a group of the form that it becomes, or kInputs of one.
// Sources: ggml-quants.c and ggml-common.h of ggml.
#pragma once
#include "block_place.h"

namespace hpcdecode::ops {

constexpr uint16_t kEight = 0x4800;  // 8 as float16

struct Q40 : Int4Layout {
    static constexpr int64_t kBytes = 18;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, reinterpret_cast<const char*>(&kEight));
        for (int i = 0; i < 32; ++i) to.code<Q40>(byte(from, 2 + i % 16) >> (i / 16 * 4) & 15, i);
    }
};

struct Q41 : Q41Layout {
    static constexpr int64_t kBytes = 20;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        for (int i = 0; i < 32; ++i) to.code<Q41>(byte(from, 4 + i % 16) >> (i / 16 * 4) & 15, i);
    }
};

// Code i, of 5 bits: a fifth bit of each of 32 codes, then the others.
inline int five_bits(const char* from, int i) {
    return (byte(from, 4 + i % 16) >> (i / 16 * 4) & 15) | (byte(from, i / 8) >> (i % 8) & 1) << 4;
}

struct Q50 : Q80Layout {
    static constexpr int64_t kBytes = 22;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 32; ++i) to.code<Q50>(static_cast<uint8_t>(five_bits(from + 2, i) - 16), i);
    }
};

struct Q51 : Q51Layout {
    static constexpr int64_t kBytes = 24;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        for (int i = 0; i < 32; ++i) to.code<Q51>(static_cast<uint8_t>(five_bits(from + 4, i)), i);
    }
};

struct Q80 : Q80Layout {
    static constexpr int64_t kBytes = 34;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 32; ++i) to.code<Q80>(byte(from, 2 + i), i);
    }
};

// Puts what a block of 256 inputs begins with: two float16, then 8 scales and 8 leasts of 6 bits in 12 bytes.
inline void put_levels(const char* from, const Place& to) {
    to.half(0, from);
    to.half(1, from + 2);
    const char* q = from + 4;
    for (int i = 0; i < 8; ++i) {
        const int scale = i < 4 ? byte(q, i) & 63 : (byte(q, i + 4) & 15) | byte(q, i - 4) >> 6 << 4;
        const int least = i < 4 ? byte(q, i + 4) & 63 : byte(q, i + 4) >> 4 | byte(q, i) >> 6 << 4;
        to.byte_at((4 + 2 * i) * kHalf, static_cast<uint8_t>(scale));
        to.byte_at((5 + 2 * i) * kHalf, static_cast<uint8_t>(least));
    }
}

struct Q4K : Q4KLayout {
    static constexpr int64_t kBytes = 144;
    static void pack(const char* from, const Place& to) {
        put_levels(from, to);
        for (int i = 0; i < 256; ++i) to.code<Q4K>(byte(from, 16 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4) & 15, i);
    }
};

struct Q5K : Q5KLayout {
    static constexpr int64_t kBytes = 176;
    static void pack(const char* from, const Place& to) {
        put_levels(from, to);
        for (int i = 0; i < 256; ++i) {
            const int low = byte(from, 48 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4) & 15;
            to.code<Q5K>(static_cast<uint8_t>(low | (byte(from, 16 + i % 32) >> (i / 32) & 1) << 4), i);
        }
    }
};

struct Q6K : Q6KLayout {
    static constexpr int64_t kBytes = 210;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 208);
        for (int i = 0; i < 16; ++i) to.byte_at((2 + i) * kHalf, byte(from, 192 + i));
        for (int i = 0; i < 256; ++i) {
            const int half = i / 128, quarter = i / 32 % 4;
            const int low = byte(from, half * 64 + quarter % 2 * 32 + i % 32) >> (quarter / 2 * 4) & 15;
            const int high = byte(from, 128 + half * 32 + i % 32) >> (quarter * 2) & 3;
            to.code<Q6K>(static_cast<uint8_t>((low | high << 4) - 32), i);
        }
    }
};

struct Q2K : Q2KLayout {
    static constexpr int64_t kBytes = 84;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 80);
        to.half(1, from + 82);
        for (int i = 0; i < 16; ++i) {
            to.byte_at((4 + 2 * i) * kHalf, byte(from, i) & 15);
            to.byte_at((5 + 2 * i) * kHalf, byte(from, i) >> 4);
        }
        for (int i = 0; i < 256; ++i) to.code<Q2K>(byte(from, 16 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3, i);
    }
};

struct Q3K : Q3KLayout {
    static constexpr int64_t kBytes = 110;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 108);
        const char* q = from + 96;
        for (int i = 0; i < 16; ++i) {
            const int low = byte(q, i % 8) >> (i / 8 * 4) & 15, high = byte(q, 8 + i % 4) >> (i / 4 * 2) & 3;
            to.byte_at((2 + i) * kHalf, static_cast<uint8_t>((low | high << 4) - 32));
        }
        for (int i = 0; i < 256; ++i) {
            const int low = byte(from, 32 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3;
            to.code<Q3K>(static_cast<uint8_t>(low | (byte(from, i % 32) >> (i / 32) & 1) << 2), i);
        }
    }
};

struct Iq4Nl : Iq4NlLayout {
    static constexpr int64_t kBytes = 18;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 32; ++i) to.code<Iq4Nl>(byte(from, 2 + i % 16) >> (i / 16 * 4) & 15, i);
    }
};

struct Iq4Xs : Iq4XsLayout {
    static constexpr int64_t kBytes = 136;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 16; ++i) {
            const int block = i / 2, low = byte(from, 4 + block / 2) >> (block % 2 * 4) & 15;
            const int high = byte(from, 2 + block / 4) >> (block % 4 * 2) & 3;
            to.byte_at((2 + i) * kHalf, static_cast<uint8_t>((low | high << 4) - 32));
        }
        for (int i = 0; i < 256; ++i) to.code<Iq4Xs>(byte(from, 8 + i / 32 * 16 + i % 16) >> (i / 16 % 2 * 4) & 15, i);
    }
};

}  // namespace hpcdecode::ops
