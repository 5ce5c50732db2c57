// Recurrent layers: takes tokens of a sequence through its state.
#pragma once
#include "recur_compress.h"
#include "recur_heads.h"
#include "recur_lanes.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Act>
inline void store_values(const RecurArgs& a, const RecurScratch& s, int64_t first, int tokens) {
    const int64_t n = int64_t{s.heads} * a.layer->v_dim, column = int64_t{a.first_head} * a.layer->v_dim;
    for (int t = 0; t < tokens; ++t) {
        Act* out = static_cast<Act*>(a.out) + (first + t) * a.out_stride + column;
        for (int64_t c = 0; c < n; c += W)
            store_some(out + c, vload(s.v + t * s.v_stride + c), n - c < W ? static_cast<int>(n - c) : W);
    }
}

template <class Act, class Num>
inline void recur_rows(const RecurArgs& a) {
    const RecurLayer& l = *a.layer;
    const int group = l.heads / l.k_heads, k_heads = (a.last_head - 1) / group - a.first_head / group + 1;
    const RecurScratch scratch(l, a.last_head - a.first_head, k_heads, a.tokens, a.scratch);
    RecurInputs<Act> inputs(a, scratch);
    for (int64_t first = a.first; first < a.end; first += a.tokens) {
        const int n = static_cast<int>(a.end - first < a.tokens ? a.end - first : a.tokens);
        inputs.prepare(first, n);
        if (l.k_dim == 0) {
            store_values<Act>(a, scratch, first, n);
        } else if (l.v_dim == 1) {
            run_lanes<Act, Num>(a, scratch, first, n);
        } else {
            run_heads<Act, Num>(a, scratch, first, n);
        }
    }
}

template <class Act>
inline void recur_states(const RecurArgs& a) {
    a.state_type == ActType::kF32 ? recur_rows<Act, float>(a) : recur_rows<Act, uint16_t>(a);
}

template <class Act>
inline void recur_any(const RecurArgs& a) {
    a.layer->compress_rate > 0 ? compress_rows<Act>(a) : recur_states<Act>(a);
}

inline void recur(const RecurArgs& a) { a.type == ActType::kF32 ? recur_any<float>(a) : recur_any<uint16_t>(a); }

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
