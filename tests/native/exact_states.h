// Random weights and rows of recurrent layers, and what layers make of them in double.
#pragma once
#include <cmath>
#include <cstring>

#include "random_rows.h"
#include "recurrent_shape.h"

namespace {

using hpcdecode::ActType;
using hpcdecode::RecurrentShape;
using hpcdecode::RecurrentWeights;

RecurrentWeights weights_of(const RecurrentShape& s) {
    RecurrentWeights w{normal(s.channels() * s.taps), {}, {}, {}};
    if (s.taps > 1) w.conv_bias = normal(s.channels());
    if (s.has_rate) w.rate = normal(int64_t{s.heads} * s.decay_dim);
    for (float& x : w.rate) x = -std::fabs(x);
    if (s.k_dim > 0 && s.heads > 3) w.skip = normal(s.heads);
    return w;
}

std::vector<float> rows_of(const RecurrentShape& s, int64_t tokens) {
    const int64_t columns = s.row_columns(ActType::kF32);
    std::vector<float> rows = normal(tokens * columns);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = s.channels(); c < columns; ++c) {
            float& x = rows[t * columns + c];
            x = c < s.channels() + s.decays() ? -0.3f * std::fabs(x) : 1 / (1 + std::exp(-x));
        }
    return rows;
}

// One head in double, as RecurrentShape defines it.
struct Exact {
    const RecurrentShape& s;
    const RecurrentWeights& w;
    const std::vector<float>& rows;

    double input(int64_t t, int64_t channel) const {
        const int64_t columns = s.row_columns(ActType::kF32);
        if (s.taps == 0) return rows[t * columns + channel];
        double x = w.conv_bias.empty() ? 0 : w.conv_bias[channel];
        for (int j = 0; j < s.taps; ++j)
            if (t - s.taps + 1 + j >= 0)
                x += double{w.conv_weight[channel * s.taps + j]} * rows[(t - s.taps + 1 + j) * columns + channel];
        return s.silu ? x / (1 + std::exp(-x)) : x;
    }
    std::vector<double> k_head(int64_t t, int64_t channel) const {
        std::vector<double> x;
        double sum = 1e-6;
        for (int d = 0; d < s.k_dim; ++d) x.push_back(input(t, channel + d));
        for (double y : x) sum += y * y;
        for (double& y : x) y /= s.normalised ? std::sqrt(sum) : 1;
        return x;
    }
    void run(int head, int64_t tokens, std::vector<double>& out) const {
        std::vector<double> state(s.k_dim * s.v_dim, 0.0);
        const int k_head_of = head / s.group();
        for (int64_t t = 0; t < tokens; ++t) {
            const float* extra = rows.data() + t * s.row_columns(ActType::kF32) + s.channels();
            const double beta = s.has_beta ? extra[s.decays() + head] : 1;
            std::vector<double> q = k_head(t, int64_t{k_head_of} * s.k_dim),
                                k = k_head(t, s.k_columns() + int64_t{k_head_of} * s.k_dim);
            for (int i = 0; i < s.k_dim; ++i) {
                const int64_t at = int64_t{head} * s.decay_dim + (s.decay_dim > 1 ? i : 0);
                const double decay = std::exp(s.has_rate ? beta * w.rate[at] : extra[at]);
                for (int j = 0; j < s.v_dim; ++j) state[i * s.v_dim + j] *= decay;
            }
            for (int j = 0; j < s.v_dim; ++j) {
                const double v = input(t, 2 * s.k_columns() + int64_t{head} * s.v_dim + j);
                double m = 0, o = s.k_dim == 0 ? v : w.skip.empty() ? 0 : w.skip[head] * v;
                for (int i = 0; i < s.k_dim; ++i) m += state[i * s.v_dim + j] * k[i];
                const double e = beta * (s.delta ? v - m : v);
                for (int i = 0; i < s.k_dim; ++i) {
                    state[i * s.v_dim + j] += k[i] * e;
                    o += state[i * s.v_dim + j] * q[i] * s.scale;
                }
                out[t * s.out_columns() + int64_t{head} * s.v_dim + j] = o;
            }
        }
    }
};

// Returns rows in bfloat16, whose float32 decays and betas take two columns each.
std::vector<uint16_t> narrowed(const RecurrentShape& s, const std::vector<float>& rows) {
    const int64_t columns = s.row_columns(ActType::kF32);
    std::vector<uint16_t> out;
    for (size_t i = 0; i < rows.size(); ++i) {
        uint16_t halves[2];
        std::memcpy(halves, &rows[i], 4);
        if (static_cast<int64_t>(i) % columns >= s.channels()) out.push_back(halves[0]);
        out.push_back(halves[1]);
    }
    return out;
}

// Returns all outputs of one sequence.
std::vector<double> exact_outputs(const RecurrentShape& s, const RecurrentWeights& w, const std::vector<float>& rows,
                                  int64_t tokens) {
    std::vector<double> out(tokens * s.out_columns());
    for (int head = 0; head < s.heads; ++head) Exact{s, w, rows}.run(head, tokens, out);
    return out;
}

}  // namespace
