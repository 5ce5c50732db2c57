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
        uint8_t codes[32];
        take_halves(from + 2, codes);
        to.store<Q40>(codes, sizeof codes);
    }
};

struct Q41 : Q41Layout {
    static constexpr int64_t kBytes = 20;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        uint8_t codes[32];
        take_halves(from + 4, codes);
        to.store<Q41>(codes, sizeof codes);
    }
};

// Takes 32 codes of 5 bits: a fifth bit of each, then the others.
inline void take_five_bits(const char* from, uint8_t* codes) {
    take_halves(from + 4, codes);
    for (int i = 0; i < 4; ++i)
        for (int bit = 0; bit < 8; ++bit) codes[8 * i + bit] |= static_cast<uint8_t>((byte(from, i) >> bit & 1) << 4);
}

struct Q50 : Q80Layout {
    static constexpr int64_t kBytes = 22;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        uint8_t codes[32];
        take_five_bits(from + 2, codes);
        for (uint8_t& code : codes) code = static_cast<uint8_t>(code - 16);
        to.store<Q50>(codes, sizeof codes);
    }
};

struct Q51 : Q51Layout {
    static constexpr int64_t kBytes = 24;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        uint8_t codes[32];
        take_five_bits(from + 4, codes);
        to.store<Q51>(codes, sizeof codes);
    }
};

struct Q80 : Q80Layout {
    static constexpr int64_t kBytes = 34;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        uint8_t codes[32];
        std::memcpy(codes, from + 2, sizeof codes);
        to.store<Q80>(codes, sizeof codes);
    }
};

// Stores the codes of 256 inputs, of(b, i) for input i of 32, b of 8.
template <class Block, class Of>
void store_256(const Place& to, const Of& of) {
    uint8_t codes[256];
    for (int b = 0; b < 8; ++b)
        for (int i = 0; i < 32; ++i) codes[b * 32 + i] = static_cast<uint8_t>(of(b, i));
    to.store<Block>(codes, sizeof codes);
}

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
        store_256<Q4K>(to, [from](int b, int i) { return byte(from, 16 + b / 2 * 32 + i) >> (b % 2 * 4) & 15; });
    }
};

struct Q5K : Q5KLayout {
    static constexpr int64_t kBytes = 176;
    static void pack(const char* from, const Place& to) {
        put_levels(from, to);
        store_256<Q5K>(to, [from](int b, int i) {
            const int low = byte(from, 48 + b / 2 * 32 + i) >> (b % 2 * 4) & 15;
            return low | (byte(from, 16 + i) >> b & 1) << 4;
        });
    }
};

struct Q6K : Q6KLayout {
    static constexpr int64_t kBytes = 210;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 208);
        for (int i = 0; i < 16; ++i) to.byte_at((2 + i) * kHalf, byte(from, 192 + i));
        store_256<Q6K>(to, [from](int b, int i) {
            const int half = b / 4, quarter = b % 4;
            const int low = byte(from, half * 64 + quarter % 2 * 32 + i) >> (quarter / 2 * 4) & 15;
            const int high = byte(from, 128 + half * 32 + i) >> (quarter * 2) & 3;
            return (low | high << 4) - 32;
        });
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
        store_256<Q2K>(to, [from](int b, int i) { return byte(from, 16 + b / 4 * 32 + i) >> (b % 4 * 2) & 3; });
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
        store_256<Q3K>(to, [from](int b, int i) {
            const int low = byte(from, 32 + b / 4 * 32 + i) >> (b % 4 * 2) & 3;
            return low | (byte(from, i) >> b & 1) << 2;
        });
    }
};

struct Iq4Nl : Iq4NlLayout {
    static constexpr int64_t kBytes = 18;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        uint8_t codes[32];
        take_halves(from + 2, codes);
        to.store<Iq4Nl>(codes, sizeof codes);
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
        store_256<Iq4Xs>(to, [from](int b, int i) { return byte(from, 8 + b * 16 + i % 16) >> (i / 16 * 4) & 15; });
    }
};

}  // namespace hpcdecode::ops
