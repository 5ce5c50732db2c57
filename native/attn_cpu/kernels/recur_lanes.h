// Heads with one column of state each (v_dim = 1): the lanes of a vector are heads.
#pragma once
#include "recur_inputs.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

enum class LaneDecay { kWhole, kRows, kRates };  // one of a head; one of each row; from rates of each row

constexpr int64_t kLanesAhead = 2048;   // numbers between the state that is read and what is prefetched
constexpr int64_t kOutputsAhead = 256;  // heads between the output that is written and what is prefetched

// n heads from `head` on; i: of the covered heads; k_head: of the covered k heads.
template <class Num>
struct LaneVector {
    int head, n, i, k_head;
    Num* state;         // [k_dim][W]
    const float* rate;  // [decay_dim][W], or null
};

template <class Act, class Num, LaneDecay kDecay>
struct Lanes {
    const RecurArgs& a;
    const RecurLayer& l;
    const RecurScratch& s;

    // Decays of a row of the state, which `spread` holds one row after the other unless they come from rates.
    static inline F decay_of(const float* decay, int row, F beta) {
        if constexpr (kDecay == LaneDecay::kRates) return vexp2(vmul(beta, vload(decay + row * W)));
        return vload(decay + (kDecay == LaneDecay::kRows ? row * W : 0));
    }

    // Turns the decays of the vector's heads to rows of lanes.
    void spread_decays(const LaneVector<Num>& x, int t, float* spread) const {
        const float* decay = s.decay + t * s.decay_stride + int64_t{x.i} * l.decay_dim;
        for (int d = 0; d < l.decay_dim; ++d)
            for (int j = 0; j < W; ++j) spread[d * W + j] = j < x.n ? decay[j * l.decay_dim + d] : 0.0f;
    }
    // The same where rates give one decay for all rows.
    void spread_rate(const LaneVector<Num>& x, F beta, float* spread) const {
        vstore(spread, vexp2(vmul(beta, vload(x.rate))));
    }

    void token(const LaneVector<Num>& x, int t, bool ahead, float* spread, Act* out) const {
        const int64_t at = t * s.k_stride + int64_t{x.k_head} * vectors_of(l.k_dim) * W;
        const float *q = s.q + at, *k = s.k + at, *decay = kDecay == LaneDecay::kRates ? x.rate : spread;
        const F beta = load_some(s.beta + int64_t{t} * s.heads + x.i, x.n);
        const F v = load_some(s.v + t * s.v_stride + x.i, x.n);
        if (kDecay == LaneDecay::kWhole && x.rate != nullptr) {
            spread_rate(x, beta, spread);
        } else if (kDecay != LaneDecay::kRates) {
            spread_decays(x, t, spread);
        }
        if (ahead) __builtin_prefetch(out + x.head + kOutputsAhead, 1);
        const int rows = l.k_dim;
        Num* state = x.state;
        F e = v, o = vzero();
        if (l.delta) {
            for (int i = 0; i < rows; ++i)
                e = vsub(e, vmul(vmul(decay_of(decay, i, beta), load_wide(state + i * W)), vset(k[i])));
        }
        e = vmul(e, beta);
        for (int i = 0; i < rows; ++i) {
            if (ahead) __builtin_prefetch(state + i * W + kLanesAhead);
            const F y =
                keep(state + i * W, vfma(vset(k[i]), e, vmul(decay_of(decay, i, beta), load_wide(state + i * W))));
            o = vfma(y, vset(q[i]), o);
        }
        if (l.skip != nullptr) o = vfma(load_some(l.skip + x.head, x.n), v, o);
        store_some(out + x.head, o, x.n);
    }

    void run(int64_t first, int tokens) const {
        const int group = l.heads / l.k_heads, vectors = vectors_of(group);
        float spread[kDecay == LaneDecay::kRows ? kMaxLaneRows * W : W];
        for (int head = a.first_head; head < a.last_head;) {
            const int k_head = head / group, in_group = head % group;
            const int64_t vector = int64_t{k_head} * vectors + in_group / W;
            const LaneVector<Num> x{head,
                                    group - in_group < W ? group - in_group : W,
                                    head - a.first_head,
                                    k_head - a.first_head / group,
                                    static_cast<Num*>(a.state) + vector * l.k_dim * W,
                                    l.rate == nullptr ? nullptr : l.rate + vector * l.decay_dim * W};
            for (int t = 0; t < tokens; ++t)
                token(x, t, t == 0, spread, static_cast<Act*>(a.out) + (first + t) * a.out_stride);
            head += x.n;
        }
    }
};

template <class Act, class Num>
inline void run_lanes(const RecurArgs& a, const RecurScratch& s, int64_t first, int tokens) {
    const RecurLayer& l = *a.layer;
    if (l.decay_dim == 1) {
        Lanes<Act, Num, LaneDecay::kWhole>{a, l, s}.run(first, tokens);
    } else if (l.has_rate) {
        Lanes<Act, Num, LaneDecay::kRates>{a, l, s}.run(first, tokens);
    } else {
        Lanes<Act, Num, LaneDecay::kRows>{a, l, s}.run(first, tokens);
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
