#include "quantise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "block_place.h"
#include "rounding.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int kLargestGroup = 128;  // inputs

// A group of an output's weights, and what they become.
struct Group {
    int count;
    float w[kLargestGroup];
    uint8_t codes[kLargestGroup];

    float largest() const {
        float most = 0;
        for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(w[i]));
        return most;
    }
};

struct Int4Codes : Int4Layout {
    struct Scales {
        uint16_t scale, zero;
    };

    static Scales round(Group& g) {
        float low = g.w[0], high = g.w[0];
        for (int i = 1; i < g.count; ++i) {
            low = std::min(low, g.w[i]);
            high = std::max(high, g.w[i]);
        }
        const float least = std::max(std::fabs(low), std::fabs(high)) / 1024;  // so that zeros are precise
        const uint16_t scale = to_half(std::min(std::max((high - low) / 15, least), 65504.0f));
        const float by = scale == 0 ? 1.0f : from_half(scale);
        const uint16_t zero = to_half(-low / by);
        for (int i = 0; i < g.count; ++i)
            g.codes[i] =
                static_cast<uint8_t>(std::min(std::max(std::nearbyint(g.w[i] / by + from_half(zero)), 0.0f), 15.0f));
        return {scale, zero};
    }

    static void store(const Scales& scales, const Place& to) {
        to.half(0, reinterpret_cast<const char*>(&scales.scale));
        to.half(1, reinterpret_cast<const char*>(&scales.zero));
    }
};

struct Mxfp4Codes : Mxfp4Layout {
    using Scales = uint8_t;

    // Of the exponents that cut off the largest number, or do not, the one with the smaller error.
    static Scales round(Group& g) {
        int exponent = 0;
        std::frexp(g.largest(), &exponent);
        Group other = g;
        const int one = stored(exponent - 3), two = stored(exponent - 2);
        if (codes(other, two) < codes(g, one)) {
            std::copy_n(other.codes, g.count, g.codes);
            return static_cast<uint8_t>(two);
        }
        return static_cast<uint8_t>(one);
    }

    static int stored(int exponent) { return std::min(std::max(exponent + 127, kLeast), kMost); }

    // Sets codes for an exponent, and returns the squared error over that of the scale.
    static float codes(Group& g, int exponent) {
        const float scale = std::ldexp(1.0f, exponent - 127), by = std::ldexp(1.0f, 127 - exponent);
        float errors = 0;
        for (int i = 0; i < g.count; ++i) {
            const float x = g.w[i] * by;
            g.codes[i] = to_fp4(x);
            const float error = (x - kFp4[g.codes[i]]) * scale;
            errors += error * error;
        }
        return errors;
    }

    static void store(Scales scale, const Place& to) { to.byte_at(0, scale); }
};

struct Fp8Codes : Fp8Layout {
    using Scales = float;

    static Scales round(Group& g) {
        const float scale = g.largest() / 448;
        set(g, scale == 0 ? 1.0f : scale);
        return scale;
    }

    static void set(Group& g, float scale) {
        for (int i = 0; i < g.count; ++i) g.codes[i] = to_fp8(std::min(std::max(g.w[i] / scale, -448.0f), 448.0f));
    }

    static void store(Scales scale, const Place& to) { to.number(scale); }
};

// For the largest number the smallest exponent: then the others have the most digits.
struct Mxfp8Codes : Mxfp8Layout {
    using Scales = uint8_t;

    static Scales round(Group& g) {
        int exponent = 0;
        const bool above = std::frexp(g.largest(), &exponent) > 0.90625f;  // 464, which rounds to 480, and that is NaN
        const int stored = std::min(std::max(exponent - 9 + (above ? 1 : 0) + 127, kLeast), kMost);
        Fp8Codes::set(g, std::ldexp(1.0f, stored - 127));
        return static_cast<uint8_t>(stored);
    }

    static void store(Scales scale, const Place& to) { to.byte_at(0, scale); }
};

struct Work {
    const Quantising& weight;
    const float* bias;
    char* out;

    template <class Codes>
    void panel(int64_t p) const {
        const int64_t inputs = weight.inputs, first = p * kPanel, all = weight.rows.size();
        char* to = out + p * (kPanel * 4 + 2 * half_bytes<Codes>(inputs));
        const int64_t count = std::min<int64_t>(kPanel, all - first);
        std::memcpy(to, bias + first, count * sizeof(float));
        Group g{0, {}, {}};
        for (int64_t r = 0; r < count; ++r) {
            char* scales = to + kPanel * 4 + r / kHalf * half_bytes<Codes>(inputs);
            char* codes = scales + scale_bytes<Codes>(inputs);
            for (int64_t i = 0; i < inputs; i += Codes::kGroup) {
                g.count = static_cast<int>(std::min(Codes::kGroup, inputs - i));
                read(weight.rows[first + r], i, g);
                const Place place{scales + i / Codes::kGroup * Codes::kScaleBytes,
                                  codes + i / kBlockInputs * Codes::kBlockBytes, static_cast<int>(r % kHalf), 0};
                Codes::store(Codes::round(g), place);
                place.store<Codes>(g.codes, g.count);
            }
        }
    }

    void read(const char* row, int64_t first, Group& g) const {
        if (weight.type == Type::f32) {
            std::memcpy(g.w, row + first * 4, g.count * sizeof(float));
            return;
        }
        for (int i = 0; i < g.count; ++i) {
            uint16_t x;
            std::memcpy(&x, row + (first + i) * 2, sizeof x);
            g.w[i] = bits<float>(static_cast<uint32_t>(x) << 16);
        }
    }
};

}  // namespace

void pack_few_bits(const Quantising& weight, const float* bias, char* out, int threads) {
    const Work work{weight, bias, out};
    run_shares(threads, panels_of(weight.rows.size()), [&](int64_t p) {
        if (weight.form == WeightForm::int4) work.panel<Int4Codes>(p);
        if (weight.form == WeightForm::mxfp4) work.panel<Mxfp4Codes>(p);
        if (weight.form == WeightForm::fp8) work.panel<Fp8Codes>(p);
        if (weight.form == WeightForm::mxfp8) work.panel<Mxfp8Codes>(p);
    });
}

}  // namespace hpcdecode::ops
