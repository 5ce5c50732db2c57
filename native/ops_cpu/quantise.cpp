#include "quantise.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "code_layout.h"
#include "product.h"
#include "rounding.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int kMost = 128;  // inputs of a group
constexpr int kHalf = kPanel / 2;

// A group of an output's weights, and what they become.
struct Group {
    Type type;
    int count;
    float w[kMost];
    uint8_t codes[kMost];

    float largest() const {
        float most = 0;
        for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(w[i]));
        return most;
    }
};

// The scales for which numbers times them round to the weights.
struct Possible {
    double low = 0, high = HUGE_VAL;

    void meet(float w, float number, Type type) {
        if (number == 0) return;
        const auto u = bits<uint32_t>(w);
        const bool power = (u & 0x7fffffu) == 0;  // smaller numbers are closer to it
        const uint64_t exponent = std::max(u >> 23 & 0xffu, 1u);
        const auto half = bits<double>((exponent + (type == Type::bf16 ? 888 : 872)) << 52);  // of the last place
        const double magnitude = std::fabs(static_cast<double>(w)), by = std::fabs(static_cast<double>(number));
        low = std::max(low, (magnitude - (power ? half / 2 : half)) / by);
        high = std::min(high, (magnitude + half) / by);
    }
};

template <class Number>
bool gives_again(const Group& g, float scale, const Number& number) {
    for (int i = 0; i < g.count; ++i)
        if (rounded_to(g.type, number(i) * scale) != g.w[i]) return false;
    return true;
}

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

    // Codes less a whole zero, -16 to 15, times a float16 scale.
    static bool find(Group& g, Scales& found) {
        constexpr int kTops[] = {8, 7, 16, 15, 14, 13, 12, 11, 10, 9, 6, 5, 4, 3, 2, 1};
        const float most = g.largest();
        if (most == 0) return false;
        for (const int top : kTops) {
            float k[kMost], low = HUGE_VALF, high = -HUGE_VALF, off = 0;
            for (int i = 0; i < g.count; ++i) {
                const float exact = g.w[i] / most * static_cast<float>(top);
                k[i] = std::nearbyint(exact);
                off = std::max(off, std::fabs(exact - k[i]));
                low = std::min(low, k[i]);
                high = std::max(high, k[i]);
            }
            if (off > 0.2f || high - low > 15) continue;
            Possible possible;
            for (int i = 0; i < g.count; ++i) possible.meet(g.w[i], k[i], g.type);
            if (possible.low > possible.high || possible.high > 65504) continue;
            const auto middle = static_cast<int>(to_half(static_cast<float>((possible.low + possible.high) / 2)));
            for (int step = 0; step < 18; ++step) {
                const auto scale =
                    static_cast<uint16_t>(std::max(middle + (step % 2 != 0 ? step / 2 + 1 : -step / 2), 1));
                if (!gives_again(g, from_half(scale), [&](int i) { return k[i]; })) continue;
                for (int i = 0; i < g.count; ++i) g.codes[i] = static_cast<uint8_t>(k[i] - low);
                found = {scale, to_half(-low)};
                return true;
            }
        }
        return false;
    }

    static void store(const Scales& scales, int output, char* to) {
        std::memcpy(to + output * 2, &scales.scale, 2);
        std::memcpy(to + (kHalf + output) * 2, &scales.zero, 2);
    }
    static void store(uint8_t code, int input, int output, char* block) { store_nibble(code, input, output, block); }
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

    static bool find(Group& g, Scales& found) {
        found = round(g);
        constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        const float scale = std::ldexp(1.0f, found - 127);
        return gives_again(g, scale, [&](int i) { return (g.codes[i] > 7 ? -1.0f : 1.0f) * kNumbers[g.codes[i] & 7]; });
    }

    static int stored(int exponent) { return std::min(std::max(exponent + 127, 2), 252); }

    // Sets codes for an exponent, and returns the squared error over that of the scale.
    static float codes(Group& g, int exponent) {
        constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        const float scale = std::ldexp(1.0f, exponent - 127), by = std::ldexp(1.0f, 127 - exponent);
        float errors = 0;
        for (int i = 0; i < g.count; ++i) {
            const float a = std::fabs(g.w[i]) * by;
            const int code = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5);
            const float error = (a - kNumbers[code]) * scale;
            errors += error * error;
            g.codes[i] = static_cast<uint8_t>(code | (g.w[i] < 0 ? 8 : 0));
        }
        return errors;
    }

    static void store(Scales scale, int output, char* to) { to[output] = static_cast<char>(scale); }
    static void store(uint8_t code, int input, int output, char* block) {
        const int word = input % 8 / 2, element = (input / 8 * kHalf + output) * 2 + input % 2;
        block[element * 2 + word / 2] |= static_cast<char>(code << (word % 2 * 4));
    }
};

struct Fp8Codes : Fp8Layout {
    using Scales = float;

    static Scales round(Group& g) {
        const float scale = g.largest() / 448;
        set(g, scale == 0 ? 1.0f : scale);
        return scale;
    }

    static bool find(Group& g, Scales& found) {
        const float most = g.largest();
        if (most == 0) return false;
        for (int fraction = 8; fraction < 16; ++fraction) {
            const int top = fraction * (fraction == 15 ? 16 : 32);  // 480 is NaN
            if (!set_near(g, most / static_cast<float>(top))) continue;
            Possible possible;
            for (int i = 0; i < g.count; ++i) possible.meet(g.w[i], from_fp8(g.codes[i]), g.type);
            if (possible.low > possible.high) continue;
            for (const double share : {0.5, 0.25, 0.75, 0.0, 1.0}) {
                found = static_cast<float>(possible.low + share * (possible.high - possible.low));
                if (gives_again(g, found, [&](int i) { return from_fp8(g.codes[i]); })) return true;
            }
        }
        return false;
    }

    // Sets codes, and returns true, if all are so near that rounding to bfloat16, of the largest too, explains the
    // rest.
    static bool set_near(Group& g, float scale) {
        for (int i = 0; i < g.count; ++i) {
            const float x = std::min(std::max(g.w[i] / scale, -448.0f), 448.0f);
            g.codes[i] = to_fp8(x);
            if (std::fabs(x - from_fp8(g.codes[i])) > std::fabs(x) / 128) return false;
        }
        return true;
    }

    static void set(Group& g, float scale) {
        for (int i = 0; i < g.count; ++i) g.codes[i] = to_fp8(std::min(std::max(g.w[i] / scale, -448.0f), 448.0f));
    }

    static void store(Scales scale, int output, char* to) { std::memcpy(to + output * 4, &scale, 4); }
    static void store(uint8_t code, int input, int output, char* block) { store_byte(code, input, output, block); }
};

// For the largest number the smallest exponent: then the others have the most digits.
struct Mxfp8Codes : Mxfp8Layout {
    using Scales = uint8_t;

    static Scales round(Group& g) {
        int exponent = 0;
        const bool above = std::frexp(g.largest(), &exponent) > 0.90625f;  // 464, which rounds to 480, and that is NaN
        const int stored = std::min(std::max(exponent - 9 + (above ? 1 : 0) + 127, 10), 134);
        Fp8Codes::set(g, std::ldexp(1.0f, stored - 127));
        return static_cast<uint8_t>(stored);
    }

    static bool find(Group& g, Scales& found) {
        found = round(g);
        return gives_again(g, std::ldexp(1.0f, found - 127), [&](int i) { return from_fp8(g.codes[i]); });
    }

    static void store(Scales scale, int output, char* to) { to[output] = static_cast<char>(scale); }
    static void store(uint8_t code, int input, int output, char* block) { store_byte(code, input, output, block); }
};

struct Work {
    const Quantising& weight;
    const float* bias;
    char* out;
    std::atomic<int64_t> off_grid{0};

    template <class Codes>
    void panel(int64_t p) {
        const int64_t inputs = weight.inputs, first = p * kPanel, all = weight.rows.size();
        char* to = out + p * (kPanel * 4 + 2 * half_bytes<Codes>(inputs));
        const int64_t count = std::min<int64_t>(kPanel, all - first);
        std::memcpy(to, bias + first, count * sizeof(float));
        Group g{weight.type, 0, {}, {}};
        int64_t missed = 0;
        for (int64_t r = 0; r < count; ++r) {
            const int output = static_cast<int>(r % kHalf);
            char* scales = to + kPanel * 4 + r / kHalf * half_bytes<Codes>(inputs);
            char* codes = scales + scale_bytes<Codes>(inputs);
            for (int64_t i = 0; i < inputs; i += Codes::kGroup) {
                g.count = static_cast<int>(std::min(Codes::kGroup, inputs - i));
                read(weight.rows[first + r], i, g);
                typename Codes::Scales scale{};
                const bool found = weight.on_grid && Codes::find(g, scale);
                if (!found) scale = Codes::round(g);
                missed += found || g.largest() == 0 ? 0 : 1;
                Codes::store(scale, output, scales + i / Codes::kGroup * Codes::kScaleBytes);
                for (int j = 0; j < g.count; ++j)
                    Codes::store(g.codes[j], j % static_cast<int>(kBlockInputs), output,
                                 codes + (i + j) / kBlockInputs * Codes::kBlockBytes);
            }
        }
        if (weight.on_grid) off_grid += missed;
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

int64_t pack_few_bits(const Quantising& weight, const float* bias, char* out, int threads) {
    Work work{weight, bias, out};
    const auto pack = [](void* data, int member, int members) {
        Work& w = *static_cast<Work*>(data);
        const int64_t panels = (static_cast<int64_t>(w.weight.rows.size()) + kPanel - 1) / kPanel;
        for (int64_t p = share(panels, member, members); p < share(panels, member + 1, members); ++p) {
            if (w.weight.form == WeightForm::int4) w.panel<Int4Codes>(p);
            if (w.weight.form == WeightForm::mxfp4) w.panel<Mxfp4Codes>(p);
            if (w.weight.form == WeightForm::fp8) w.panel<Fp8Codes>(p);
            if (w.weight.form == WeightForm::mxfp8) w.panel<Mxfp8Codes>(p);
        }
    };
    run_team(threads, threads, pack, &work);
    return work.off_grid;
}

}  // namespace hpcdecode::ops
