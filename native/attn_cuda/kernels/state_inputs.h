// What recurrent layers are given: rows, and the causal convolution of each of their channels.
#pragma once
#include "../block.h"
#include "../states_api.h"
#include "numbers.h"

namespace hpcdecode {

// A sequence of a call, and the number of its first row.
struct StateSequence {
    int64_t place, count, first;

    HPC_DEVICE StateSequence(const StatesArgs& a, int sequence)
        : place(a.sequences[sequence]),
          count(a.sequences[a.sequence_count + sequence]),
          first(a.sequences[2 * a.sequence_count + sequence]) {}
};

HPC_DEVICE float exp_of(float x) { return power_of_2(x * kLog2E); }

HPC_DEVICE float row_channel(const StatesArgs& a, int64_t row, int64_t channel) {
    return load_act(a.rows, a.type, row * a.stride + channel);
}
// Returns q, k or v of a row as the recurrence takes it, but for factors.
HPC_DEVICE float state_input(const StatesArgs& a, int64_t row, int64_t channel) {
    return a.inputs ? a.inputs[row * a.layer.channels + channel] : row_channel(a, row, channel);
}
// Returns one of the float32 behind the channels of a row.
HPC_DEVICE float row_float(const StatesArgs& a, int64_t row, int64_t i) {
    const int64_t from = row * a.stride + a.layer.channels;
    if (a.type == ActType::kF32) return static_cast<const float*>(a.rows)[from + i];
    const uint16_t* halves = static_cast<const uint16_t*>(a.rows) + from + 2 * i;
    return as_float(pair(halves[0], halves[1]));
}
HPC_DEVICE int64_t decays_of(const StatesLayer& l) {
    return l.has_rate ? 0 : static_cast<int64_t>(l.heads) * l.decay_dim;
}
HPC_DEVICE float beta_of(const StatesArgs& a, int64_t row, int head) {
    return a.layer.has_beta ? row_float(a, row, decays_of(a.layer) + head) : 1.0f;
}

// Returns a channel of a sequence `position` tokens from its first one in the call; negative: from its window.
HPC_DEVICE float channel_at(const StatesArgs& a, const StateSequence& s, int64_t position, int64_t channel) {
    if (position >= 0) return row_channel(a, s.first + position, channel);
    const int64_t kept = a.layer.taps - 1;
    return a.layer.windows[(s.place * kept + kept + position) * a.layer.channels + channel];
}

// Takes a part of a sequence's tokens through the convolution of a channel. Layers without states have their output by
// it.
HPC_DEVICE void convolve_channel(const StatesArgs& a, const StateSequence& s, int part, int64_t channel) {
    const StatesLayer& l = a.layer;
    const int64_t first = static_cast<int64_t>(part) * kConvolvedTogether;
    const int64_t last = first + kConvolvedTogether < s.count ? first + kConvolvedTogether : s.count;
    for (int64_t i = first; i < last; ++i) {
        float x = l.bias ? l.bias[channel] : 0.0f;
        for (int tap = 0; tap < l.taps; ++tap)
            x += channel_at(a, s, i + tap - (l.taps - 1), channel) * l.convolution[tap * l.channels + channel];
        if (l.silu) x = x / (1.0f + exp_of(-x));
        if (l.k_dim > 0) {
            a.inputs[(s.first + i) * l.channels + channel] = x;
        } else {
            store_act(a.out, a.type, (s.first + i) * a.out_stride + channel, x);
        }
    }
}

// Keeps what the convolution of a sequence's next tokens needs. After `convolve`, because it overwrites windows. Each
// of `parts` blocks has some of the channels.
HPC_DEVICE void keep_window(Block& block, const StatesArgs& a, const StateSequence& s, int part, int parts,
                            int threads) {
    const StatesLayer& l = a.layer;
    const int64_t kept = l.taps - 1;
    if (kept < 1) return;
    const int64_t first = l.channels * part / parts, last = l.channels * (part + 1) / parts;
    block.each([&](int t) {
        for (int64_t channel = first + t; channel < last; channel += threads)
            for (int64_t i = 0; i < kept; ++i)  // what moves within the window comes from behind
                l.windows[(s.place * kept + i) * l.channels + channel] = channel_at(a, s, s.count - kept + i, channel);
    });
}

}  // namespace hpcdecode
