// Recurrent layers: takes tokens of a sequence through its state.
#pragma once
#include "recur_heads.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// Heads with a column of state each (v_dim = 1): a vector has one state row of W heads.
template <class Act>
struct Lanes {
    const RecurArgs& a;
    const RecurLayer& l;
    const RecurScratch& s;

    // n heads from `head` on, whose state is [k_dim][W]; i: of the covered heads; k_head: of the covered k heads.
    struct Vector {
        int head, n, i, k_head;
        float* state;
        const float* rate;  // [decay_dim][W], or null
    };

    inline F decay_of(const Vector& x, int t, int row, F beta) const {
        const int d = l.decay_dim == 1 ? 0 : row;
        if (x.rate != nullptr) return vexp2(vmul(beta, vload(x.rate + d * W)));
        float lanes[W] = {};
        const float* decay = s.decay + t * s.decay_stride + int64_t{x.i} * l.decay_dim + d;
        for (int j = 0; j < x.n; ++j) lanes[j] = decay[j * l.decay_dim];
        return vload(lanes);
    }

    void token(const Vector& x, int t, Act* out) const {
        const int64_t at = t * s.k_stride + int64_t{x.k_head} * vectors_of(l.k_dim) * W;
        const float *q = s.q + at, *k = s.k + at;
        const F beta = load_some(s.beta + int64_t{t} * s.heads + x.i, x.n);
        const F v = load_some(s.v + t * s.v_stride + x.i, x.n);
        F e = v, o = vzero();
        if (l.delta) {
            for (int i = 0; i < l.k_dim; ++i) {
                const F decayed = vmul(decay_of(x, t, i, beta), vload(x.state + i * W));
                vstore(x.state + i * W, decayed);
                e = vsub(e, vmul(decayed, vset(k[i])));
            }
        }
        e = vmul(e, beta);
        const F whole = l.delta || l.decay_dim > 1 ? vset(1.0f) : decay_of(x, t, 0, beta);
        for (int i = 0; i < l.k_dim; ++i) {
            const F a = l.delta || l.decay_dim == 1 ? whole : decay_of(x, t, i, beta);
            const F y = vfma(vset(k[i]), e, vmul(a, vload(x.state + i * W)));
            vstore(x.state + i * W, y);
            o = vfma(y, vset(q[i]), o);
        }
        if (l.skip != nullptr) o = vfma(load_some(l.skip + x.head, x.n), v, o);
        store_some(out + x.head, o, x.n);
    }

    void run(int64_t first, int tokens) const {
        const int group = l.heads / l.k_heads, vectors = vectors_of(group);
        for (int head = a.first_head; head < a.last_head;) {
            const int k_head = head / group, in_group = head % group;
            const int64_t vector = int64_t{k_head} * vectors + in_group / W;
            Vector x{head,
                     group - in_group < W ? group - in_group : W,
                     head - a.first_head,
                     k_head - a.first_head / group,
                     a.state + vector * l.k_dim * W,
                     l.rate == nullptr ? nullptr : l.rate + vector * l.decay_dim * W};
            for (int t = 0; t < tokens; ++t) token(x, t, static_cast<Act*>(a.out) + (first + t) * a.out_stride);
            head += x.n;
        }
    }
};

template <class Act>
inline void store_values(const RecurArgs& a, const RecurScratch& s, int64_t first, int tokens) {
    const int64_t n = int64_t{s.heads} * a.layer->v_dim, column = int64_t{a.first_head} * a.layer->v_dim;
    for (int t = 0; t < tokens; ++t) {
        Act* out = static_cast<Act*>(a.out) + (first + t) * a.out_stride + column;
        for (int64_t c = 0; c < n; c += W)
            store_some(out + c, vload(s.v + t * s.v_stride + c), n - c < W ? static_cast<int>(n - c) : W);
    }
}

template <class Act>
inline void recur_rows(const RecurArgs& a) {
    const RecurLayer& l = *a.layer;
    const int group = l.heads / l.k_heads, k_heads = (a.last_head - 1) / group - a.first_head / group + 1;
    const RecurScratch scratch(l, a.last_head - a.first_head, k_heads, a.tokens, a.scratch);
    RecurInputs<Act> inputs(a, scratch);
    for (int64_t first = 0; first < a.count; first += a.tokens) {
        const int n = static_cast<int>(a.count - first < a.tokens ? a.count - first : a.tokens);
        inputs.prepare(first, n);
        if (l.k_dim == 0) {
            store_values<Act>(a, scratch, first, n);
        } else if (l.v_dim == 1) {
            Lanes<Act>{a, l, scratch}.run(first, n);
        } else {
            run_heads<Act>(a, scratch, first, n);
        }
    }
}

inline void recur(const RecurArgs& a) { a.type == ActType::kF32 ? recur_rows<float>(a) : recur_rows<uint16_t>(a); }

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
