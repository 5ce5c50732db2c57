// Takes sequences through recurrent layers on a device, emulated, in buffers of their exact size.
#pragma once
#include <algorithm>
#include <vector>

#include "block.h"
#include "check.h"
#include "exact_states.h"
#include "recurrence.h"

namespace {

// A layer in memory of the device, which is this machine's.
struct LayerOnDevice {
    const RecurrentShape& shape;
    std::vector<float> convolution, rate, windows, states;
    hpcdecode::Recurrence recurrence;

    LayerOnDevice(const RecurrentShape& s, const RecurrentWeights& w, ActType numbers, int places)
        : shape(s),
          convolution(turned(w.conv_weight, s.taps)),
          rate(s.v_dim == 1 ? turned(w.rate, s.decay_dim) : w.rate),
          windows(places * std::max(s.taps - 1, 0) * s.channels()),
          states(places * s.heads * s.k_dim * s.v_dim / (numbers == ActType::kF32 ? 1 : 2)),
          recurrence(s, numbers,
                     {convolution.data(), w.conv_bias.empty() ? nullptr : w.conv_bias.data(), rate.data(),
                      w.skip.empty() ? nullptr : w.skip.data(), windows.data(), states.data()},
                     0) {}

    // Returns [n, columns] as [columns, n].
    static std::vector<float> turned(const std::vector<float>& x, int columns) {
        std::vector<float> out(x.size());
        const size_t n = columns > 0 ? x.size() / columns : 0;
        for (size_t i = 0; i < x.size(); ++i) out[i % columns * n + i / columns] = x[i];
        return out;
    }

    // Takes tokens of sequences at places 2 and 0 through it.
    template <class Act>
    std::vector<Act> advance(const std::vector<Act>& rows, int first, int second) {
        const ActType type = sizeof(Act) == 4 ? ActType::kF32 : ActType::kBF16;
        const std::vector<int32_t> sequences = {2, 0, first, second, 0, first};
        const int tokens = first + second;
        std::vector<Act> in = rows, out(tokens * shape.out_columns());
        std::vector<float> inputs(tokens * shape.channels());
        const int64_t columns = shape.row_columns(type);
        recurrence.advance(sequences.data(), 2, std::max(first, second), {in.data(), type, tokens, columns, columns},
                           {out.data(), type, tokens, shape.out_columns(), shape.out_columns()}, inputs.data(),
                           nullptr);
        return out;
    }
};

// Two sequences with the same tokens, one by one chunk and token after token: equal bits, close to those in double.
void states_case(const RecurrentShape& s, ActType numbers, int tokens) {
    const RecurrentWeights w = weights_of(s);
    const std::vector<float> rows = rows_of(s, tokens);
    const std::vector<double> expected = exact_outputs(s, w, rows, tokens);
    LayerOnDevice layer(s, w, numbers, 3);
    const int64_t columns = s.row_columns(ActType::kF32), wide = s.out_columns();
    std::vector<float> twice(rows.begin(), rows.begin() + (tokens - 1) * columns), outs;
    twice.insert(twice.end(), rows.begin(), rows.begin() + columns);
    outs = layer.advance(twice, tokens - 1, 1);
    std::vector<float> apart(outs.begin() + (tokens - 1) * wide, outs.end());
    for (int t = 1; t < tokens; ++t) {
        const bool last = t + 1 == tokens;  // of the sequence at place 2, too
        std::vector<float> in;
        if (last) in.assign(rows.end() - columns, rows.end());
        in.insert(in.end(), rows.begin() + t * columns, rows.begin() + (t + 1) * columns);
        const std::vector<float> part = layer.advance(in, last, 1);
        if (last) outs.resize((tokens - 1) * wide), outs.insert(outs.end(), part.begin(), part.begin() + wide);
        apart.insert(apart.end(), part.end() - wide, part.end());
    }
    CHECK(outs == apart, "k_dim %d v_dim %d: by tokens", s.k_dim, s.v_dim);
    double error = 0, size = 0;
    for (size_t i = 0; i < outs.size(); ++i) {
        error = std::fmax(error, std::isfinite(outs[i]) ? std::fabs(expected[i] - outs[i]) : INFINITY);
        size = std::fmax(size, std::fabs(expected[i]));
    }
    CHECK(error <= (numbers == ActType::kF32 ? 2e-5 : 0.05) * size, "k_dim %d v_dim %d: error %g of %g", s.k_dim,
          s.v_dim, error, size);
    const std::vector<uint16_t> narrow = narrowed(s, rows);
    const std::vector<uint16_t> one(narrow.begin(), narrow.begin() + s.row_columns(ActType::kBF16));
    std::vector<uint16_t> both = narrow;
    both.insert(both.end(), one.begin(), one.end());
    LayerOnDevice fresh(s, w, numbers, 3);
    const std::vector<uint16_t> out = fresh.advance(both, tokens, 1);
    CHECK(std::equal(out.end() - wide, out.end(), out.begin()), "k_dim %d v_dim %d: bfloat16", s.k_dim, s.v_dim);
}

void check_states() {
#ifdef HPCDECODE_BLOCK_THREADS
    constexpr int kTokens = 9;  // more than are prepared together
    const std::vector<ActType> kNumbers = {ActType::kF32};
    constexpr int kShapes = 4;  // phases of the others, and of bfloat16, are the same
#else
    constexpr int kTokens = 70;
    const std::vector<ActType> kNumbers = {ActType::kF32, ActType::kBF16};
    constexpr int kShapes = 8;
#endif
    const RecurrentShape shapes[] = {
        {4, 2, 32, 64, 4, true, true, true, 0.2f, 1, true, false},      // Gated DeltaNet
        {2, 2, 40, 132, 4, true, true, true, 0.2f, 40, true, false},    // KDA, columns in two parts
        {3, 1, 130, 20, 4, true, false, false, 1.0f, 1, true, false},   // Mamba-2
        {130, 1, 16, 1, 0, false, false, false, 1.0f, 16, true, true},  // Mamba-1
        {20, 2, 30, 1, 2, false, true, true, 0.5f, 1, true, false},     // heads of one value with the delta rule
        {3, 1, 0, 52, 3, false, false, false, 1.0f, 1, false, false},   // a convolution alone
        {4, 2, 9, 8, 0, false, true, false, 0.5f, 9, true, true},       // decays of rows by rates
        {2, 1, 7, 4, 1, false, false, true, 0.5f, 7, false, false},     // decays of rows, no beta
    };
    for (int i = 0; i < kShapes; ++i)
        for (ActType numbers : kNumbers) states_case(shapes[i], numbers, kTokens);
}

}  // namespace
