// Compressors: of each channel the mean of a window's values, weighted by the softmax of their gates.
#pragma once
#include "recur_inputs.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr float kNoGate = -1e30f;  // of a mean of nothing

// A mean of W channels: the largest gate, and the sums of exp(gate - largest) and of that times the value.
struct GatedMean {
    F top, sum, total;

    inline F faded(F other_top, F all) const {
        return vexp2(vmax(vset(-150.0f), vmul(vsub(other_top, all), vset(kLog2E))));
    }
    inline void add(F gate, F value) {
        const F most = vmax(top, gate), old = faded(top, most), own = faded(gate, most);
        sum = vfma(sum, old, own);
        total = vfma(total, old, vmul(own, value));
        top = most;
    }
    inline F with(const GatedMean& other) const {
        const F most = vmax(top, other.top), mine = faded(top, most), its = faded(other.top, most);
        return vdiv(vfma(total, mine, vmul(other.total, its)), vfma(sum, mine, vmul(other.sum, its)));
    }
    inline F mean() const { return vdiv(total, sum); }
};

inline GatedMean no_mean() { return {vset(kNoGate), vzero(), vzero()}; }

// The means of W channels in a state: [means][top, sum, total][channels].
struct MeansAt {
    float* at;
    int64_t channels;  // padded to vectors

    inline float* part(int mean, int i) const { return at + (mean * 3 + i) * channels; }
    inline GatedMean load(int mean) const { return {vload(part(mean, 0)), vload(part(mean, 1)), vload(part(mean, 2))}; }
    inline void store(int mean, const GatedMean& m) const {
        vstore(part(mean, 0), m.top);
        vstore(part(mean, 1), m.sum);
        vstore(part(mean, 2), m.total);
    }
};

// Returns n floats, which may lie at any two bytes.
inline F load_floats(const uint8_t* at, int n) {
    float x[W] = {};
    __builtin_memcpy(x, at, (n < W ? n : W) * sizeof(float));
    return vload(x);
}

// With windows that overlap, a row has two values and gates of each channel: those for the next window's mean, and
// those for its own. State: what the window before gave for this one's mean, and what this one gives for both.
template <class Act>
inline void compress_rows(const RecurArgs& a) {
    const RecurLayer& l = *a.layer;
    const int64_t padded = int64_t{vectors_of(l.heads)} * W;
    const int series = l.overlaps ? 2 : 1;
    for (int c = a.first_head; c < a.last_head; c += W) {
        const int n = a.last_head - c < W ? a.last_head - c : W;
        const MeansAt means{static_cast<float*>(a.state) + c, padded};
        GatedMean own = means.load(0), next = l.overlaps ? means.load(1) : own,
                  before = l.overlaps ? means.load(2) : own;
        if (a.position + a.first == 0) own = next = no_mean();
        for (int64_t t = a.first; t < a.end; ++t) {
            const Act* values = static_cast<const Act*>(a.rows) + t * a.stride;
            const uint8_t* gates = reinterpret_cast<const uint8_t*>(values + l.heads * series);
            if ((a.position + t) % l.compress_rate == 0) {
                before = next;
                own = next = no_mean();
            }
            const int of_own = (series - 1) * l.heads + c;
            own.add(load_floats(gates + of_own * sizeof(float), n), load_some(values + of_own, n));
            if (l.overlaps) next.add(load_floats(gates + c * sizeof(float), n), load_some(values + c, n));
            store_some(static_cast<Act*>(a.out) + t * a.out_stride + c, l.overlaps ? own.with(before) : own.mean(), n);
        }
        means.store(0, own);
        if (!l.overlaps) continue;
        means.store(1, next);
        means.store(2, before);
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
