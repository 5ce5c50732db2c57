// Partial results: (m, sum of weights, weighted values), for weights relative to 2^m. m = -inf marks an empty one.
//
#pragma once
#include "rotate.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

struct Partial {
    float* m;
    float* sum;
    float* acc;  // [v_pad]
};
inline Partial partial_at(float* base, int row, int v_pad) {
    float* p = base + static_cast<size_t>(row) * (2 + v_pad);
    return {p, p + 1, p + 2};
}

inline void clear_partials(float* base, int rows, int v_pad) {
    for (int r = 0; r < rows; ++r) {
        const Partial p = partial_at(base, r, v_pad);
        *p.m = -__builtin_inff();
        *p.sum = 0.0f;
        for (int d = 0; d < v_pad; d += W) vstore(p.acc + d, vzero());
    }
}

// Merges a later partial result into `into`.
inline void fold(const Partial& into, float m, float sum, const float* acc, int v_pad) {
    const float inf = __builtin_inff();
    if (m == -inf) return;
    const float top = *into.m > m ? *into.m : m;
    const float a = *into.m == -inf ? 0.0f : exp2_one(*into.m - top), b = exp2_one(m - top);
    *into.m = top;
    *into.sum = *into.sum * a + sum * b;
    const F va = vset(a), vb = vset(b);
    for (int d = 0; d < v_pad; d += W) vstore(into.acc + d, vfma(vload(into.acc + d), va, vmul(vload(acc + d), vb)));
}

// Returns the sink of a query row, or -inf, which adds nothing.
inline float sink_of(const SinkArgs& sinks, int64_t token, int head) {
    if (sinks.of_rows != nullptr) return load_act(sinks.of_rows, sinks.type, token * sinks.stride + head);
    return sinks.of_heads != nullptr ? sinks.of_heads[head] : -__builtin_inff();
}

// Overwrites p if the values are rotated.
inline void write_out(const Partial& p, float sink, int v_dim, int v_rotation, void* out, ActType type, int64_t at) {
    const float inf = __builtin_inff();
    float total = *p.sum, weight = 1.0f;
    if (sink != -inf) {
        const float s = sink * kLog2E, top = *p.m > s ? *p.m : s;
        weight = *p.m == -inf ? 0.0f : exp2_one(*p.m - top);
        total = total * weight + exp2_one(s - top);
    }
    const float inverse = (total > 0.0f || total != total ? weight / total : 0.0f) / static_cast<float>(v_rotation);
    rotate(p.acc, v_dim, v_rotation);
    int d = 0;
    for (; d + W <= v_dim; d += W) {
        const F x = vmul(vload(p.acc + d), vset(inverse));
        if (type == ActType::kF32) {
            vstore(static_cast<float*>(out) + at + d, x);
        } else {
            store_bf16(static_cast<uint16_t*>(out) + at + d, x);
        }
    }
    for (; d < v_dim; ++d) store_act(out, type, at + d, p.acc[d] * inverse);
}

inline void merge_partials(const MergeArgs& a) {
    float* total = reinterpret_cast<float*>(a.scratch);
    for (int r = 0; r < a.heads * a.rows; ++r) {
        clear_partials(total, 1, a.v_pad);
        const Partial into = partial_at(total, 0, a.v_pad);
        for (int i = 0; i < a.count; ++i) {
            const Partial p = partial_at(const_cast<float*>(a.partials) + i * a.partial_stride, r, a.v_pad);
            fold(into, *p.m, *p.sum, p.acc, a.v_pad);
        }
        const int row = r % a.rows, head = r / a.rows * a.group + row % a.group;
        const int64_t at = row / a.group * a.out_stride + static_cast<int64_t>(head) * a.v_dim;
        write_out(into, sink_of(a.sinks, row / a.group, head), a.v_dim, a.v_rotation, a.out, a.type, at);
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
