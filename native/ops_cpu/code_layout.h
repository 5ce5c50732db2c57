// Where the code of an input and an output lies in a block of 32 inputs of half a panel; weight_form.h describes them.
#pragma once
#include <cstdint>

namespace hpcdecode::ops {

// Codes of 4 bits of int4 and of GGUF's forms. The block is zeros so far.
inline void store_nibble(uint8_t code, int input, int output, char* block) {
    const int word = input % 16 / 2, lane = (input / 16 * 2 + output / 8) * 16 + output % 8 * 2 + input % 2;
    block[lane * 4 + word / 2] |= static_cast<char>(code << (word % 2 * 4));
}

// Codes of mxfp4.
inline void store_fp4(uint8_t code, int input, int output, char* block) {
    const int word = input % 8 / 2, element = (input / 8 * 16 + output) * 2 + input % 2;
    block[element * 2 + word / 2] |= static_cast<char>(code << (word % 2 * 4));
}

// Codes of a byte.
inline void store_byte(uint8_t code, int input, int output, char* block) {
    block[input / 2 * 32 + output % 8 * 4 + input % 2 * 2 + output / 8] = static_cast<char>(code);
}

}  // namespace hpcdecode::ops
