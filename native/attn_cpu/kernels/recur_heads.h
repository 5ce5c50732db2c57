// The state of one head, a block of columns at a time, through some tokens.
//
// Two passes over the state are enough for a token of the delta rule. With S before the token, a = exp(decay), and
// m = S^T (a k), p = S^T (a q):
//
//   e = beta * (v - m)    S <- a S + k e^T    o = p + (k q) e + skip v
//
// The pass that updates S for a token computes m and p of the next token, too.
#pragma once
#include "recur_inputs.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int kBlockVectors = 4;

// One head and its tokens; strides are floats between tokens. Num: Of the state.
template <class Act, class Num>
struct HeadTokens {
    int k_dim, count;
    Num* state;  // of the head
    const float *q, *k, *decayed_q, *decayed_k, *v, *decay, *beta, *kq;
    int64_t k_stride, decayed_stride, v_stride, decay_stride, beta_stride, kq_stride;
    float skip;
    Act* out;
    int64_t out_stride;
    int v_dim;
};

// N vectors of columns of a head. kRows: Each row of the state has a decay of its own.
template <class Act, class Num, int N, bool kRows>
struct ColumnBlock {
    const HeadTokens<Act, Num>& h;
    Num* state;  // [k_dim][N * W]
    int column;  // first one
    bool last;   // of the call: no block comes after it

    struct Sums {
        F m[N], p[N];
    };

    // m and p of token t, from the state before it.
    inline void look(int t, Sums& sums) const {
        const float *k = h.decayed_k + t * h.decayed_stride, *q = h.decayed_q + t * h.decayed_stride;
        const Num* s = state;
        const int rows = h.k_dim;
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) sums.m[j] = sums.p[j] = vzero();
        for (int i = 0; i < rows; ++i, s += N * W) {
            const F ki = vset(k[i]), qi = vset(q[i]);
            prefetch_next(s);
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                const F x = load_wide(s + j * W);
                sums.m[j] = vfma(x, ki, sums.m[j]);
                sums.p[j] = vfma(x, qi, sums.p[j]);
            }
        }
    }

    // Writes the state after token t. kLook: Also m and p of the next token.
    template <bool kLook>
    inline void update(int t, const F* e, Sums& sums) const {
        const float *k = h.k + t * h.k_stride, *next_k = h.decayed_k + (t + 1) * h.decayed_stride,
                    *next_q = h.decayed_q + (t + 1) * h.decayed_stride, *decay = h.decay + t * h.decay_stride;
        const F whole = vset(*decay);
        Num* s = state;
        const int rows = h.k_dim;
        if constexpr (kLook) {
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) sums.m[j] = sums.p[j] = vzero();
        }
        for (int i = 0; i < rows; ++i, s += N * W) {
            const F ki = vset(k[i]), a = kRows ? vset(decay[i]) : whole;
            const F kn = kLook ? vset(next_k[i]) : vzero(), qn = kLook ? vset(next_q[i]) : vzero();
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                const F x = keep(s + j * W, vfma(ki, e[j], vmul(a, load_wide(s + j * W))));
                if constexpr (kLook) {
                    sums.m[j] = vfma(x, kn, sums.m[j]);
                    sums.p[j] = vfma(x, qn, sums.p[j]);
                }
            }
        }
    }

    // Prefetches a row of the next block. Behind the last one nothing else is read soon.
    inline void prefetch_next(const Num* row) const {
        if (last) return;
        const char* next = reinterpret_cast<const char*>(row + int64_t{h.k_dim} * N * W);
#pragma GCC unroll 4
        for (int byte = 0; byte < N * W * static_cast<int>(sizeof(Num)); byte += 64) __builtin_prefetch(next + byte);
    }

    // Where a single token's output goes. The state's stores would wait behind one that waits for memory.
    inline void prefetch_output() const {
        if (h.count > 1) return;
#pragma GCC unroll 4
        for (int j = 0; j < N * W; j += 64 / static_cast<int>(sizeof(Act))) __builtin_prefetch(h.out + column + j, 1);
    }

    inline F value(int t, int j) const { return vload(h.v + t * h.v_stride + column + j * W); }

    inline void put(int t, int j, F o) const {
        const int at = column + j * W;
        store_some(h.out + t * h.out_stride + at, o, h.v_dim - at);
    }

    void delta() const {
        Sums sums;
        prefetch_output();
        look(0, sums);
        for (int t = 0; t < h.count; ++t) {
            const F a = vset(kRows ? 1.0f : h.decay[t * h.decay_stride]), beta = vset(h.beta[t * h.beta_stride]),
                    kq = vset(h.kq[t * h.kq_stride]);
            F e[N];
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                const F v = value(t, j);
                e[j] = vmul(beta, vsub(v, vmul(a, sums.m[j])));
                put(t, j, vfma(vset(h.skip), v, vfma(kq, e[j], vmul(a, sums.p[j]))));
            }
            t + 1 < h.count ? update<true>(t, e, sums) : update<false>(t, e, sums);
        }
    }

    // Without the delta rule one pass is enough.
    void plain() const {
        prefetch_output();
        for (int t = 0; t < h.count; ++t) {
            const float *k = h.k + t * h.k_stride, *q = h.q + t * h.k_stride, *decay = h.decay + t * h.decay_stride;
            const F whole = vset(*decay), beta = vset(h.beta[t * h.beta_stride]);
            F e[N], o[N];
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                e[j] = vmul(beta, value(t, j));
                o[j] = vzero();
            }
            Num* s = state;
            const int rows = h.k_dim;
            for (int i = 0; i < rows; ++i, s += N * W) {
                const F ki = vset(k[i]), qi = vset(q[i]), a = kRows ? vset(decay[i]) : whole;
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) {
                    const F x = vfma(ki, e[j], vmul(a, load_wide(s + j * W)));
                    keep(s + j * W, x);
                    o[j] = vfma(x, qi, o[j]);
                }
            }
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) put(t, j, vfma(vset(h.skip), value(t, j), o[j]));
        }
    }
};

template <int N, class Act, class Num>
inline void run_block(const HeadTokens<Act, Num>& h, Num* state, int column, bool last, bool delta, bool by_row) {
    if (by_row) {
        const ColumnBlock<Act, Num, N, true> block{h, state, column, last};
        delta ? block.delta() : block.plain();
    } else {
        const ColumnBlock<Act, Num, N, false> block{h, state, column, last};
        delta ? block.delta() : block.plain();
    }
}

template <class Act, class Num>
inline void run_columns(const HeadTokens<Act, Num>& h, bool last_head, bool delta, bool by_row) {
    const int vectors = vectors_of(h.v_dim), blocks = (vectors + kBlockVectors - 1) / kBlockVectors;
    for (int b = 0; b < blocks; ++b) {
        const int first = vectors * b / blocks, n = vectors * (b + 1) / blocks - first;
        Num* state = h.state + int64_t{first} * W * h.k_dim;
        const bool last = last_head && b + 1 == blocks;
        if (n == 1) run_block<1>(h, state, first * W, last, delta, by_row);
        if (n == 2) run_block<2>(h, state, first * W, last, delta, by_row);
        if (n == 3) run_block<3>(h, state, first * W, last, delta, by_row);
        if (n == 4) run_block<4>(h, state, first * W, last, delta, by_row);
    }
}

// Multiplies q and k of a head's tokens by the decays of the state's rows.
inline void decay_rows(const RecurLayer& l, const RecurScratch& s, int head, int k_head, int tokens) {
    const int k_pad = vectors_of(l.k_dim) * W;
    for (int t = 0; t < tokens; ++t) {
        const float* decay = s.decay + t * s.decay_stride + int64_t{head} * l.k_dim;
        const int64_t from = t * s.k_stride + int64_t{k_head} * k_pad;
        for (int d = 0; d < k_pad; d += W) {
            const F a = vload(decay + d);
            vstore(s.decayed_q + int64_t{t} * k_pad + d, vmul(a, vload(s.q + from + d)));
            vstore(s.decayed_k + int64_t{t} * k_pad + d, vmul(a, vload(s.k + from + d)));
        }
    }
}

// Takes tokens [first, first + n) of the call, whose inputs are prepared, through all heads.
template <class Act, class Num>
inline void run_heads(const RecurArgs& a, const RecurScratch& s, int64_t first, int n) {
    const RecurLayer& l = *a.layer;
    const int group = l.heads / l.k_heads, k_pad = vectors_of(l.k_dim) * W, v_pad = vectors_of(l.v_dim) * W;
    const bool by_row = l.decay_dim > 1;
    for (int i = 0; i < s.heads; ++i) {
        const int head = a.first_head + i, k_head = head / group - a.first_head / group;
        HeadTokens<Act, Num> h;
        h.k_dim = l.k_dim;
        h.count = n;
        h.state = static_cast<Num*>(a.state) + int64_t{head} * l.k_dim * v_pad;
        h.q = s.q + int64_t{k_head} * k_pad;
        h.k = s.k + int64_t{k_head} * k_pad;
        h.k_stride = s.k_stride;
        h.decayed_q = by_row ? s.decayed_q : h.q;
        h.decayed_k = by_row ? s.decayed_k : h.k;
        h.decayed_stride = by_row ? k_pad : s.k_stride;
        h.v = s.v + int64_t{i} * v_pad;
        h.v_stride = s.v_stride;
        h.decay = s.decay + int64_t{i} * l.decay_dim;
        h.decay_stride = s.decay_stride;
        h.beta = s.beta + i;
        h.beta_stride = s.heads;
        h.kq = s.kq + k_head;
        h.kq_stride = s.k_heads;
        h.skip = l.skip == nullptr ? 0.0f : l.skip[head];
        h.out = static_cast<Act*>(a.out) + first * a.out_stride + int64_t{head} * l.v_dim;
        h.out_stride = a.out_stride;
        h.v_dim = l.v_dim;
        if (by_row && l.delta) decay_rows(l, s, i, k_head, n);
        run_columns(h, i + 1 == s.heads, l.delta, by_row);
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
