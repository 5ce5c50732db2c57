#include "recurrent_layers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

constexpr size_t kPage = 4096, kLine = 64;
constexpr int kMaxUnit = 16;       // heads that stay together because they share a k head
constexpr int kLaneVectors = 8;    // vectors of lanes that stay together
constexpr int64_t kExtraRows = 8;  // the work beside the state, in rows of it
constexpr float kLog2E = 1.44269504088896341f;

size_t bytes_of(ActType type) { return type == ActType::kF32 ? 4 : 2; }

size_t padded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

int padded(int n, int to) { return (n + to - 1) / to * to; }

bool has_lanes(const RecurrentShape& s) { return s.v_dim == 1 && s.k_dim > 0; }

ActType state_type(const RecurrentShape& s, StateTypes types) {
    return s.compress_rate > 0 ? ActType::kF32 : types.states;
}

// Returns the numbers of a layer's state.
int64_t state_floats(const RecurrentShape& s, int width) {
    if (s.compress_rate > 0) return int64_t{padded(s.heads, width)} * 3 * (s.overlaps ? 3 : 1);
    if (has_lanes(s)) return int64_t{s.k_heads} * padded(s.group(), width) * s.k_dim;
    return int64_t{s.heads} * s.k_dim * padded(s.v_dim, width);
}

RecurCost cost_of(const RecurrentShape& s, int width) {
    int unit = 1, least = 1;
    if (has_lanes(s)) {
        least = s.group() % width == 0 ? width : s.group();
        unit = s.group() % (width * kLaneVectors) == 0 ? width * kLaneVectors : least;
    } else if (s.compress_rate > 0) {
        unit = least = std::min(width, s.heads);
    } else if (s.k_dim > 0 && s.group() <= kMaxUnit) {
        unit = s.group();
    }
    return {s.heads, unit, least, (s.k_dim + kExtraRows) * s.v_dim, state_floats(s, width) / s.heads};
}

std::vector<float> transposed(const std::vector<float>& from, int64_t rows, int64_t columns) {
    std::vector<float> to(from.size());
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
    return to;
}

// Returns rates of lanes, [k head][vector][decay_dim][width], for powers of two.
std::vector<float> rates_of_lanes(const RecurrentShape& s, const std::vector<float>& rate, int width) {
    const int vectors = padded(s.group(), width) / width;
    std::vector<float> to(size_t(s.k_heads) * vectors * s.decay_dim * width, 0.0f);
    for (int head = 0; head < s.heads; ++head) {
        const int64_t vector = int64_t{head / s.group()} * vectors + head % s.group() / width;
        for (int d = 0; d < s.decay_dim; ++d)
            to[(vector * s.decay_dim + d) * width + head % s.group() % width] =
                rate[int64_t{head} * s.decay_dim + d] * kLog2E;
    }
    return to;
}

const float* data_of(const std::vector<float>& x) { return x.empty() ? nullptr : x.data(); }

// Lays a layer out from byte `at` of a place on; returns where it ends.
size_t lay_out(RecurrentLayer& l, StateTypes types, int width, int lookahead, size_t at) {
    l.state_bytes = state_floats(l.shape, width) * bytes_of(state_type(l.shape, types));
    l.window_rows = (l.shape.taps > 1 ? l.shape.taps : 0) + lookahead;
    l.window_columns = lookahead > 0 ? l.shape.row_columns(types.rows) : l.shape.channels();
    l.window_bytes = l.window_rows * l.window_columns * bytes_of(types.rows);
    l.state = at;
    l.window = at + padded(l.state_bytes, kLine);
    return l.window + padded(l.window_bytes, kLine);
}

RecurLayer kernel_of(const RecurrentLayer& layer) {
    const RecurrentShape& s = layer.shape;
    RecurLayer l{};
    l.heads = s.heads;
    l.k_heads = s.k_heads;
    l.k_dim = s.k_dim;
    l.v_dim = s.v_dim;
    l.taps = s.taps;
    l.decay_dim = s.k_dim > 0 ? s.decay_dim : 1;
    l.silu = s.silu;
    l.delta = s.delta;
    l.normalised = s.normalised;
    l.has_beta = s.has_beta;
    l.has_rate = s.has_rate;
    l.compress_rate = s.compress_rate;
    l.overlaps = s.overlaps;
    l.scale = s.scale;
    l.channels = s.channels();
    l.conv_weight = data_of(layer.weights.conv_weight);
    l.conv_bias = data_of(layer.weights.conv_bias);
    l.rate = data_of(layer.weights.rate);
    l.skip = data_of(layer.weights.skip);
    return l;
}

}  // namespace

RecurrentLayers::RecurrentLayers(const std::vector<RecurrentShape>& shapes, std::vector<RecurrentWeights> weights,
                                 StateTypes types, int width, int lookahead)
    : types_(types), width_(width) {
    if (shapes.empty()) throw std::invalid_argument("layers: expected at least one");
    if (shapes.size() != weights.size())
        throw std::invalid_argument("weights: expected those of " + std::to_string(shapes.size()) + " layers, got " +
                                    std::to_string(weights.size()));
    size_t at = 0;
    layers_.reserve(shapes.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
        const RecurrentShape& s = shapes[i];
        check_recurrent(s);
        check_weights(s, weights[i], "layer " + std::to_string(i));
        layers_.push_back({s, {}, std::move(weights[i]), cost_of(s, width), 0, 0, 0, 0, 0, 0});
        RecurrentLayer& l = layers_.back();
        l.weights.conv_weight = transposed(l.weights.conv_weight, s.channels(), s.taps);
        if (has_lanes(s) && s.has_rate) l.weights.rate = rates_of_lanes(s, l.weights.rate, width);
        l.kernel = kernel_of(l);
        at = lay_out(l, types, width, lookahead, at);
    }
    place_bytes_ = padded(at, kPage);
}

StatePart RecurrentLayers::part(const RecurrentLayer& l, int first_head, int last_head) const {
    const RecurrentShape& s = l.shape;
    const size_t size = bytes_of(state_type(s, types_));
    if (s.compress_rate > 0) {
        const size_t row = padded(s.heads, width_) * size;
        return {first_head * size, padded(last_head - first_head, width_) * size, row, s.overlaps ? 9 : 3};
    }
    if (has_lanes(s)) {
        const int group = s.group(), vectors = padded(group, width_) / width_;
        const auto place = [&](int head) { return size_t(head / group) * vectors + head % group / width_; };
        const size_t vector = size_t(s.k_dim) * width_ * size;
        return {place(first_head) * vector, (place(last_head - 1) + 1 - place(first_head)) * vector, 0, 1};
    }
    const size_t head = size_t(s.k_dim) * padded(s.v_dim, width_) * size;
    return {first_head * head, (last_head - first_head) * head, 0, 1};
}

size_t place_bytes(const std::vector<RecurrentShape>& shapes, StateTypes types, int width, int lookahead) {
    size_t at = 0;
    for (const RecurrentShape& s : shapes) {
        check_recurrent(s);
        RecurrentLayer l{};
        l.shape = s;
        at = lay_out(l, types, width, lookahead, at);
    }
    return padded(at, kPage);
}

}  // namespace hpcdecode
