// What rows of q have beside the queries, as kernels take it.
#pragma once
#include "kernel_api.h"
#include "matrix.h"

namespace hpcdecode {

// rows: Of q, and what follows it.
// token, q_head: The first ones of a call of a kernel.
inline BiasArgs bias_args(const LayerShape& shape, const Matrix& rows, int64_t token, int64_t q_head) {
    const PositionBias& b = shape.bias;
    if (b.dim == 0) return {};
    const void* mixes = at(rows, token, shape.bias_column() + q_head * b.dim);
    return {b.extent > 0 ? b.first() : nullptr, b.stride(), b.extent, b.dim, mixes};
}

// sinks: Of the layer's query heads, or null.
inline SinkArgs sink_args(const LayerShape& shape, const float* sinks, const Matrix& rows, int64_t token,
                          int64_t q_head) {
    SinkArgs a{};
    if (sinks != nullptr) a.of_heads = sinks + q_head;
    if (shape.row_sinks) a.of_rows = at(rows, token, shape.sink_column() + q_head);
    a.type = rows.type;
    a.stride = rows.stride;
    return a;
}

}  // namespace hpcdecode
