// What the heads of a recurrent layer are given: q, k and v after convolution and norms, decays and betas, in float32.
#pragma once
#include "../recur_api.h"
#include "math.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int kInputsAhead = 512;  // elements between what is read and what is prefetched

constexpr int vectors_of(int n) { return (n + W - 1) / W; }

inline F load_wide(const float* p) { return vload(p); }
inline F load_wide(const uint16_t* p) { return load_bf16(p); }

// Returns n elements, and zeros behind them if n < W.
template <class Act>
inline F load_some(const Act* p, int n) {
    if (n >= W) return load_wide(p);
    Act x[W] = {};
    __builtin_memcpy(x, p, n * sizeof(Act));
    return load_wide(x);
}

// Stores the first n elements, W at most.
inline void store_some(float* p, F a, int n) {
    if (n >= W) return vstore(p, a);
    float x[W];
    vstore(x, a);
    __builtin_memcpy(p, x, n * sizeof(float));
}
inline void store_some(uint16_t* p, F a, int n) {
    if (n >= W) return store_bf16(p, a);
    uint16_t x[W];
    store_bf16(x, a);
    __builtin_memcpy(p, x, n * sizeof(uint16_t));
}

// Stores a vector of a state; returns what loading it will give.
inline F keep(float* p, F a) {
    vstore(p, a);
    return a;
}
inline F keep(uint16_t* p, F a) {
#ifdef HPCDECODE_VECTOR_KEEP_BF16
    return keep_bf16(p, a);
#else
    store_bf16(p, a);
    return load_bf16(p);
#endif
}

inline F vsilu(F x) {
    const F minus = vmul(x, vset(-kLog2E));
    const F held = vsub(vzero(), vmax(vset(-126.0f), vsub(vzero(), minus)));  // vexp2 takes 127 at most
    return vdiv(x, vadd(vset(1.0f), vexp2(held)));
}

// Where the inputs of `tokens` tokens lie in scratch; [token][...] each. Lengths are padded to vectors.
struct RecurScratch {
    int heads, k_heads;            // that are covered
    int64_t k_stride, v_stride;    // floats between tokens of q and k; of v
    int64_t decay_stride;          // floats between tokens
    float *q, *k, *v, *decay;      // decay: exp of it
    float *beta, *kq;              // [token][heads]; [token][k_heads]: k times q
    float *decayed_k, *decayed_q;  // of one head, [token][k_dim], for decays of rows
    int64_t floats;                // all of it

    RecurScratch(const RecurLayer& l, int heads_, int k_heads_, int tokens, float* at)
        : heads(heads_), k_heads(k_heads_), floats(0) {
        const bool lanes = l.v_dim == 1 || l.k_dim == 0;
        const int64_t k_pad = vectors_of(l.k_dim) * W, v_pad = int64_t{vectors_of(l.v_dim)} * W;
        k_stride = k_heads * k_pad;
        v_stride = lanes ? (int64_t{heads} * l.v_dim + W - 1) / W * W : heads * v_pad;
        const int64_t values = l.k_dim == 0 ? 0 : int64_t{heads} * l.decay_dim;
        decay_stride = l.has_rate && lanes ? 0 : (values + W - 1) / W * W;
        const bool by_row = !lanes && l.decay_dim > 1;
        const auto take = [&](int64_t n) {
            float* p = at == nullptr ? nullptr : at + floats;
            floats += (n + 2 * W - 1) / W * W;  // reading may end a vector later
            return p;
        };
        q = take(tokens * k_stride);
        k = take(tokens * k_stride);
        v = take(tokens * v_stride);
        decay = take(tokens * decay_stride);
        beta = take(int64_t{tokens} * heads);
        kq = take(int64_t{tokens} * k_heads);
        decayed_k = take(by_row ? tokens * k_pad : 0);
        decayed_q = take(by_row ? tokens * k_pad : 0);
    }
};

inline int64_t recur_scratch_floats(const RecurLayer& l, int heads, int tokens) {
    const int group = l.heads / l.k_heads, k_heads = (heads + group - 2) / group + 1;
    return RecurScratch(l, heads, k_heads < l.k_heads ? k_heads : l.k_heads, tokens, nullptr).floats;
}

template <class Act>
class RecurInputs {
  public:
    RecurInputs(const RecurArgs& a, const RecurScratch& to)
        : a_(a), l_(*a.layer), to_(to), first_k_(a.first_head / (l_.heads / l_.k_heads)) {}

    // Prepares tokens [first, first + n) of the call.
    void prepare(int64_t first, int n) {
        find_history(first, n);
        const int64_t k_columns = int64_t{l_.k_heads} * l_.k_dim, k_channel = int64_t{first_k_} * l_.k_dim;
        if (l_.k_dim > 0) {
            convolve_heads(k_channel, to_.k_heads, l_.k_dim, to_.q, to_.k_stride, n);
            convolve_heads(k_columns + k_channel, to_.k_heads, l_.k_dim, to_.k, to_.k_stride, n);
            for (int t = 0; t < n; ++t)
                for (int i = 0; i < to_.k_heads; ++i) finish_k_head(t, i, vectors_of(l_.k_dim) * W);
        }
        const int64_t channel = 2 * k_columns + int64_t{a_.first_head} * l_.v_dim;
        if (l_.v_dim == 1 || l_.k_dim == 0) {
            convolve(channel, to_.heads * l_.v_dim, to_.v, to_.v_stride, n);
        } else {
            convolve_heads(channel, to_.heads, l_.v_dim, to_.v, to_.v_stride, n);
        }
        for (int t = 0; l_.k_dim > 0 && t < n; ++t) read_floats(first + t, t);
    }

  private:
    const Act* row(int64_t token) const { return static_cast<const Act*>(a_.rows) + token * a_.stride; }

    // Finds the inputs of the tokens and of taps - 1 before; null before the sequence's first.
    void find_history(int64_t first, int n) {
        const int before = l_.taps > 0 ? l_.taps - 1 : 0;
        for (int i = 0; i < before + n; ++i) {
            const int64_t token = first - before + i, position = a_.position + token;
            if (token >= 0) {
                from_[i] = row(token);
            } else if (position >= 0) {
                from_[i] = static_cast<const Act*>(a_.window) + position % a_.window_rows * a_.window_stride;
            } else {
                from_[i] = nullptr;
            }
        }
    }

    // Writes heads of `dim` channels, each padded to vectors.
    void convolve_heads(int64_t channel, int heads, int dim, float* to, int64_t stride, int tokens) const {
        const int pad = vectors_of(dim) * W;
        if (pad == dim) return convolve(channel, heads * dim, to, stride, tokens);
        for (int i = 0; i < heads; ++i) convolve(channel + i * dim, dim, to + int64_t{i} * pad, stride, tokens);
    }

    // Writes n channels of every token; zeros fill the last vector.
    void convolve(int64_t channel, int n, float* to, int64_t stride, int tokens) const {
        for (int c = 0; c < n; c += W) {
            const int lanes = n - c < W ? n - c : W;
            if (tokens == 1) prefetch_inputs(channel + c);
            for (int t = 0; t < tokens; ++t) vstore(to + t * stride + c, convolved(channel + c, lanes, t));
        }
    }
    // A single token's inputs come from memory.
    inline void prefetch_inputs(int64_t channel) const {
        const int inputs = l_.taps > 0 ? l_.taps : 1;
        for (int j = 0; j < inputs; ++j)
            if (from_[j] != nullptr) __builtin_prefetch(from_[j] + channel + kInputsAhead);
    }
    inline F convolved(int64_t channel, int lanes, int t) const {
        if (l_.taps == 0) return load_some(from_[t] + channel, lanes);
        F x = l_.conv_bias == nullptr ? vzero() : load_some(l_.conv_bias + channel, lanes);
        for (int j = 0; j < l_.taps; ++j) {
            if (from_[t + j] == nullptr) continue;
            x = vfma(load_some(l_.conv_weight + j * l_.channels + channel, lanes),
                     load_some(from_[t + j] + channel, lanes), x);
        }
        return l_.silu ? vsilu(x) : x;
    }

    // Normalises and scales q and k of a head, and multiplies them.
    void finish_k_head(int t, int i, int k_pad) const {
        float *q = to_.q + t * to_.k_stride + i * k_pad, *k = to_.k + t * to_.k_stride + i * k_pad;
        const float q_factor = l_.scale * (l_.normalised ? inverse_norm(q, k_pad) : 1.0f);
        const float k_factor = l_.normalised ? inverse_norm(k, k_pad) : 1.0f;
        F product = vzero();
        for (int d = 0; d < k_pad; d += W) {
            const F x = vmul(vload(q + d), vset(q_factor)), y = vmul(vload(k + d), vset(k_factor));
            vstore(q + d, x);
            vstore(k + d, y);
            product = vfma(x, y, product);
        }
        to_.kq[t * to_.k_heads + i] = hsum(product);
    }
    static inline float inverse_norm(const float* x, int n) {
        F sum = vzero();
        for (int d = 0; d < n; d += W) sum = vfma(vload(x + d), vload(x + d), sum);
        return 1.0f / __builtin_sqrtf(hsum(sum) + 1e-6f);
    }

    // Reads the float32 of a row, which may lie at any two bytes.
    void read_floats(int64_t token, int t) const {
        const uint8_t* at = reinterpret_cast<const uint8_t*>(row(token) + l_.channels);
        const int64_t first = int64_t{a_.first_head} * l_.decay_dim, n = int64_t{to_.heads} * l_.decay_dim;
        float *decay = to_.decay + t * to_.decay_stride, *beta = to_.beta + int64_t{t} * to_.heads;
        if (!l_.has_rate) __builtin_memcpy(decay, at + first * sizeof(float), n * sizeof(float));
        if (l_.has_beta) {
            const int64_t skipped = l_.has_rate ? 0 : int64_t{l_.heads} * l_.decay_dim;
            __builtin_memcpy(beta, at + (skipped + a_.first_head) * sizeof(float), to_.heads * sizeof(float));
        } else {
            for (int i = 0; i < to_.heads; ++i) beta[i] = 1.0f;
        }
        if (l_.has_rate && l_.v_dim == 1) return;  // lanes multiply as they go
        if (l_.has_rate)
            for (int64_t i = 0; i < n; ++i) decay[i] = l_.rate[first + i] * beta[i / l_.decay_dim];
        for (int64_t i = 0; i < n; i += W) vstore(decay + i, vexp2(vmul(vload(decay + i), vset(kLog2E))));
    }

    const RecurArgs& a_;
    const RecurLayer& l_;
    const RecurScratch& to_;
    const int first_k_;
    const Act* from_[kMaxRecurTokens + kMaxTaps];
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
