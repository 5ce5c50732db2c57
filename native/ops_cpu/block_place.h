// Where the scales and codes of a block go that is packed in the panels of GEMMs; weight_form.h describes them.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "code_layout.h"
#include "product.h"
#include "weight_form.h"

namespace hpcdecode::ops {

constexpr int kHalf = kPanel / 2;

inline uint8_t byte(const char* p, int64_t i) { return static_cast<uint8_t>(p[i]); }

// Takes 32 codes of 4 bits from 16 bytes: two neighbours from each, or one of the first and one of the second half.
inline void take_neighbours(const char* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) codes[2 * i] = byte(from, i) & 15, codes[2 * i + 1] = byte(from, i) >> 4;
}
inline void take_halves(const char* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) codes[i] = byte(from, i) & 15, codes[16 + i] = byte(from, i) >> 4;
}

// Where the scales of a group, and the codes of a block's inputs, of one output lie.
struct Place {
    char *scales, *codes;
    int output;
    int first;  // the block's first input in its group

    void number(float value) const { std::memcpy(scales + output * 4, &value, sizeof value); }

    void half(int row, const char* from) const { std::memcpy(scales + (row * kHalf + output) * 2, from, 2); }
    void byte_at(int64_t row, uint8_t value) const { scales[row + output] = static_cast<char>(value); }
    // Stores the codes of some inputs from the first one on, a multiple of 32.
    template <class Layout>
    void store(const uint8_t* of_inputs, int count) const {
        char* block = codes;
        for (int i = 0; i < count; i += kBlockInputs, block += Layout::kBlockBytes)
            if constexpr (std::is_base_of_v<Mxfp4Layout, Layout>)
                store_fp4(of_inputs + i, output, block);
            else if constexpr (Layout::kBlockBytes == Int4Layout::kBlockBytes)
                store_nibbles(of_inputs + i, output, block);
            else
                store_bytes(of_inputs + i, output, block);
    }
};

}  // namespace hpcdecode::ops
