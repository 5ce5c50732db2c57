// The recurrence of heads with one value, as Mamba-1 has them: a thread has a head.
#pragma once
#include "state_heads.h"

namespace hpcdecode {

// Num: Of states. kRows: k_dim at most.
template <class Num, int kRows>
struct LaneRecurrence {
    const StatesArgs& a;
    int head;
    float state[kRows], rate[kRows];
    int64_t q_channel, k_channel, v_channel;

    HPC_DEVICE LaneRecurrence(const StatesArgs& a, int head) : a(a), head(head) {
        const StatesLayer& l = a.layer;
        const int64_t k_columns = static_cast<int64_t>(l.k_heads) * l.k_dim;
        q_channel = static_cast<int64_t>(head / (l.heads / l.k_heads)) * l.k_dim;
        k_channel = k_columns + q_channel;
        v_channel = 2 * k_columns + head;
        HPC_UNROLL
        for (int i = 0; i < kRows; ++i)
            rate[i] = l.has_rate && i < l.k_dim ? l.rate[static_cast<int64_t>(i % l.decay_dim) * l.heads + head] : 0.0f;
    }

    HPC_DEVICE Num* numbers(int64_t place) const {
        return static_cast<Num*>(a.layer.states) + place * a.layer.k_dim * a.layer.heads + head;
    }
    HPC_DEVICE void load(int64_t place) {
        const Num* from = numbers(place);
        HPC_UNROLL
        for (int i = 0; i < kRows; ++i)
            state[i] = i < a.layer.k_dim ? number_of(from[static_cast<int64_t>(i) * a.layer.heads]) : 0.0f;
    }
    HPC_DEVICE void store(int64_t place) const {
        Num* to = numbers(place);
        HPC_UNROLL
        for (int i = 0; i < kRows; ++i)
            if (i < a.layer.k_dim) put(to + static_cast<int64_t>(i) * a.layer.heads, state[i]);
    }
    HPC_DEVICE static float number_of(float x) { return x; }
    HPC_DEVICE static float number_of(uint16_t x) { return float_of_bf16(x); }
    HPC_DEVICE static void put(float* p, float x) { *p = x; }
    HPC_DEVICE static void put(uint16_t* p, float x) { *p = bf16_of(x); }

    // Returns what a vector of k_dim channels is multiplied by to have a norm of 1.
    HPC_DEVICE float normaliser(int64_t row, int64_t channel) const {
        float sum = 0.0f;
        for (int i = 0; i < a.layer.k_dim; ++i) {
            const float x = state_input(a, row, channel + i);
            sum += x * x;
        }
        return 1.0f / sqrtf(sum + kNormEpsilon);
    }

    HPC_DEVICE void token(int64_t row) {
        const StatesLayer& l = a.layer;
        const float beta = beta_of(a, row, head), v = state_input(a, row, v_channel);
        const float of_k = l.normalised ? normaliser(row, k_channel) : 1.0f;
        const float of_q = l.normalised ? l.scale * normaliser(row, q_channel) : l.scale;
        float seen = 0.0f, o = 0.0f;
        HPC_UNROLL
        for (int i = 0; i < kRows; ++i) {
            if (i >= l.k_dim) continue;
            const int64_t number = static_cast<int64_t>(head) * l.decay_dim + i % l.decay_dim;
            state[i] *= exp_of(l.has_rate ? beta * rate[i] : row_float(a, row, number));
            if (l.delta) seen += state[i] * state_input(a, row, k_channel + i);
        }
        const float e = beta * (v - of_k * seen) * of_k;
        HPC_UNROLL
        for (int i = 0; i < kRows; ++i) {
            if (i >= l.k_dim) continue;
            const float y = state[i] + state_input(a, row, k_channel + i) * e;
            state[i] = kept_as(static_cast<Num*>(nullptr), y);
            o += state[i] * state_input(a, row, q_channel + i);
        }
        const float skip = l.skip ? l.skip[head] : 0.0f;
        store_act(a.out, a.type, row * a.out_stride + head, of_q * o + skip * v);
    }
};

}  // namespace hpcdecode
