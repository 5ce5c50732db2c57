// Where the codes of 32 inputs of an output lie in a block of half a panel; weight_form.h describes them.
#pragma once
#include <cstdint>
#include <cstring>

namespace hpcdecode::ops {

// Returns the lower halves of the bytes 0, 2, 4 and 6 in 16 bits.
inline uint32_t even_nibbles(uint64_t bytes) {
    bytes &= 0x000f000f000f000f;
    bytes = (bytes | bytes >> 12) & 0x000000ff000000ff;
    return static_cast<uint32_t>((bytes | bytes >> 24) & 0xffff);
}

inline uint64_t eight(const uint8_t* codes) {
    uint64_t bytes;
    std::memcpy(&bytes, codes, sizeof bytes);
    return bytes;
}

inline void store_word(uint32_t word, char* block, int at) { std::memcpy(block + at * 4, &word, sizeof word); }

// Codes of 4 bits of int4 and of GGUF's forms.
inline void store_nibbles(const uint8_t* codes, int output, char* block) {
    for (int half = 0; half < 2; ++half)
        for (int odd = 0; odd < 2; ++odd) {
            const uint32_t first = even_nibbles(eight(codes + half * 16) >> (odd * 8));
            const uint32_t second = even_nibbles(eight(codes + half * 16 + 8) >> (odd * 8));
            store_word(first | second << 16, block, (half * 2 + output / 8) * 16 + output % 8 * 2 + odd);
        }
}

// Codes of mxfp4.
inline void store_fp4(const uint8_t* codes, int output, char* block) {
    for (int word = 0; word < 4; ++word) {
        const uint64_t own = eight(codes + word * 8);
        store_word(even_nibbles(own) | even_nibbles(own >> 8) << 16, block, word * 16 + output);
    }
}

// Codes of a byte.
inline void store_bytes(const uint8_t* codes, int output, char* block) {
    char* to = block + output % 8 * 4 + output / 8;
    for (int input = 0; input < 32; ++input) to[input / 2 * 32 + input % 2 * 2] = static_cast<char>(codes[input]);
}

}  // namespace hpcdecode::ops
