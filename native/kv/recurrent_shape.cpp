#include "recurrent_shape.h"

#include <cmath>
#include <stdexcept>

namespace hpcdecode {
namespace {

constexpr int kMaxSize = 1 << 20;  // of a number in a shape, so that products fit

std::string str(int64_t x) { return std::to_string(x); }

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

void check_range(const char* name, int value, int low, int high) {
    if (value < low || value > high)
        invalid(std::string(name) + ": expected " + str(low) + " to " + str(high) + ", got " + str(value));
}

void check_size(const std::string& name, size_t got, int64_t expected) {
    if (static_cast<int64_t>(got) != expected)
        invalid(name + ": expected " + str(expected) + " values, got " + str(static_cast<int64_t>(got)));
}

}  // namespace

void check_recurrent(const RecurrentShape& s) {
    check_range("heads", s.heads, 1, kMaxSize);
    check_range("k_heads", s.k_heads, 1, kMaxSize);
    check_range("v_dim", s.v_dim, 1, kMaxSize);
    check_range("k_dim", s.k_dim, 0, s.v_dim == 1 ? kMaxLaneRows : 1 << 12);
    check_range("taps", s.taps, 0, kMaxTaps);
    if (s.heads % s.k_heads != 0)
        invalid("heads: expected a multiple of k_heads " + str(s.k_heads) + ", got " + str(s.heads));
    if (s.channels() > INT32_MAX) invalid("channels: " + str(s.channels()) + " are too many");
    if (!std::isfinite(s.scale)) invalid("scale: expected a finite number");
    if (s.silu && s.taps == 0) invalid("silu: expected False where taps is 0");
    check_range("compress_rate", s.compress_rate, 0, kMaxSize);
    if (s.overlaps && s.compress_rate == 0) invalid("overlaps: expected False where compress_rate is 0");
    if (s.compress_rate > 0 && (s.k_dim > 0 || s.v_dim > 1 || s.taps > 0))
        invalid("compress_rate: expected heads of one value, and no keys and convolution");
    if (s.k_dim == 0) {
        if (s.delta || s.normalised || s.has_beta || s.has_rate)
            invalid("k_dim 0: expected no delta, normalised, has_beta and has_rate");
        if (s.taps == 0 && s.compress_rate == 0) invalid("taps: expected at least 1 where k_dim is 0, got 0");
        return;
    }
    if (s.decay_dim != 1 && s.decay_dim != s.k_dim)
        invalid("decay_dim: expected 1 or k_dim " + str(s.k_dim) + ", got " + str(s.decay_dim));
    if (s.has_rate && !s.has_beta) invalid("has_rate: expected has_beta, too");
}

void check_weights(const RecurrentShape& s, const RecurrentWeights& w, const std::string& name) {
    check_size(name + ": conv_weight", w.conv_weight.size(), s.channels() * s.taps);
    if (!w.conv_bias.empty()) check_size(name + ": conv_bias", w.conv_bias.size(), s.taps > 0 ? s.channels() : 0);
    check_size(name + ": rate", w.rate.size(), s.has_rate ? int64_t{s.heads} * s.decay_dim : 0);
    if (!w.skip.empty()) check_size(name + ": skip", w.skip.size(), s.k_dim > 0 ? s.heads : 0);
}

}  // namespace hpcdecode
