// The matrices that a KV cache is given, and the checks of their shapes.
#pragma once
#include <cstdint>

#include "shape.h"

namespace hpcdecode {

struct Matrix {
    void* data;
    ActType type;
    int64_t rows, columns, stride;  // elements
};

inline const uint8_t* at(const Matrix& m, int64_t row, int64_t column) {
    const int64_t size = m.type == ActType::kF32 ? 4 : 2;
    return static_cast<const uint8_t*>(m.data) + (row * m.stride + column) * size;
}

// All throw std::invalid_argument with what was expected. tokens: New rows of the call.
void check_layer(int layer, size_t layers);
void check_size(const char* name, const Matrix& m, int64_t rows, int64_t columns);
void check_append(const LayerShape& shape, int64_t tokens, const Matrix& kv);
void check_attend(const LayerShape& shape, int64_t tokens, const Matrix& qkv, const Matrix& out, const float* sinks,
                  int64_t sink_count);
void check_sinks(const LayerShape& shape, const float* sinks, int64_t sink_count);

}  // namespace hpcdecode
