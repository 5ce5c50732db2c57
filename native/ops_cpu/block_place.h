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

// Where the scales of a group, and the codes of a block's inputs, of one output lie.
struct Place {
    char *scales, *codes;
    int output;
    int first;  // the block's first input in its group

    void number(float value) const { std::memcpy(scales + output * 4, &value, sizeof value); }

    void half(int row, const char* from) const { std::memcpy(scales + (row * kHalf + output) * 2, from, 2); }
    void byte_at(int64_t row, uint8_t value) const { scales[row + output] = static_cast<char>(value); }
    template <class Layout>
    void code(uint8_t code, int input) const {
        char* block = codes + input / kBlockInputs * Layout::kBlockBytes;
        const int own = input % static_cast<int>(kBlockInputs);
        if constexpr (std::is_base_of_v<Mxfp4Layout, Layout>)
            store_fp4(code, own, output, block);
        else if constexpr (Layout::kBlockBytes == Int4Layout::kBlockBytes)
            store_nibble(code, own, output, block);
        else
            store_byte(code, own, output, block);
    }
};

}  // namespace hpcdecode::ops
