// The steps of a fused kernel.
#pragma once
#if defined(__AVX512F__)
#include "activations_avx512.h"
#endif
#include "rotate.h"
#include "weights.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

#define EACH_ROW(s)                           \
    for (int64_t i = 0; i < (s).dims[0]; ++i) \
        for (int64_t j = 0; j < (s).dims[1]; ++j)

inline int64_t row_of(const View& v, int64_t i, int64_t j) { return v.at + i * v.stride[0] + j * v.stride[1]; }

struct Float {
    static float round(float x) { return x; }
};
struct Bfloat {
    static float round(float x) { return round_bf16(x); }
};

template <class R, float (*f)(float)>
void unary(const Step& s, float* scratch) {
    EACH_ROW(s) {
        const float* __restrict a = scratch + row_of(s.a, i, j);
        float* __restrict out = scratch + row_of(s.out, i, j);
        for (int64_t k = 0; k < s.dims[2]; ++k) out[k] = R::round(f(a[k]));
    }
}

// The same by a function of a whole row of n numbers.
template <class R, void (*f)(int64_t n, const float* a, float* out)>
void unary_row(const Step& s, float* scratch) {
    EACH_ROW(s) {
        float* out = scratch + row_of(s.out, i, j);
        f(s.dims[2], scratch + row_of(s.a, i, j), out);
        for (int64_t k = 0; k < s.dims[2]; ++k) out[k] = R::round(out[k]);
    }
}

// An operand that is the same for a whole row has inner stride 0.
template <class R, float (*f)(float, float)>
void binary(const Step& s, float* scratch) {
    const int64_t n = s.dims[2];
    EACH_ROW(s) {
        const float* __restrict a = scratch + row_of(s.a, i, j);
        const float* __restrict b = s.has_b ? scratch + row_of(s.b, i, j) : &s.scalar;
        float* __restrict out = scratch + row_of(s.out, i, j);
        if (s.a.stride[2] == 0) {
            const float x = *a;
            for (int64_t k = 0; k < n; ++k) out[k] = R::round(f(x, b[k * s.b.stride[2]]));
        } else if (s.b.stride[2] == 0) {
            const float y = *b;
            for (int64_t k = 0; k < n; ++k) out[k] = R::round(f(a[k], y));
        } else {
            for (int64_t k = 0; k < n; ++k) out[k] = R::round(f(a[k], b[k]));
        }
    }
}

template <class R>
void copy(const Step& s, float* scratch) {
    const int64_t from = s.a.stride[2], to = s.out.stride[2];
    EACH_ROW(s) {
        const float* __restrict a = scratch + row_of(s.a, i, j);
        float* __restrict out = scratch + row_of(s.out, i, j);
        if (from == 1 && to == 1) {
            for (int64_t k = 0; k < s.dims[2]; ++k) out[k] = R::round(a[k]);
        } else {
            for (int64_t k = 0; k < s.dims[2]; ++k) out[k * to] = R::round(a[k * from]);
        }
    }
}

// Adds up in 64 running sums, then adds one half of them to the other.
inline float sum_of(const float* a, int64_t n) {
    constexpr int kLanes = 64;
    float lanes[kLanes] = {};
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] += a[k + l];
    for (int l = 0; k + l < n; ++l) lanes[l] += a[k + l];
    return folded(lanes, add_f);
}

inline float peak_of(const float* a, int64_t n) {
    constexpr int kLanes = 64;
    float lanes[kLanes] = {};
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] = maximum_f(lanes[l], std::fabs(a[k + l]));
    for (int l = 0; k + l < n; ++l) lanes[l] = maximum_f(lanes[l], std::fabs(a[k + l]));
    return folded(lanes, maximum_f);
}

inline float most_of(const float* a, int64_t n) { return largest(n, a); }

template <class R, float (*f)(const float*, int64_t)>
void reduce(const Step& s, float* scratch) {
    EACH_ROW(s) scratch[row_of(s.out, i, j)] = R::round(f(scratch + row_of(s.a, i, j), s.dims[2]) * s.scalar);
}

template <class R>
void rotate(const Step& s, float* scratch) {
    EACH_ROW(s) rotate_run(s.dims[2], s.scalar, scratch + row_of(s.a, i, j), scratch + row_of(s.out, i, j));
    if (s.dims[1] > 1)
        for (int64_t i = 0; i < s.dims[0]; ++i)
            mix_runs(s.dims[1], s.dims[2], s.out.stride[1], s.matrix, scratch + row_of(s.out, i, 0));
    EACH_ROW(s) {
        float* out = scratch + row_of(s.out, i, j);
        for (int64_t k = 0; k < s.dims[2]; ++k) out[k] = R::round(out[k]);
    }
}

// Of numbers that are not comparable, the first that are left are taken.
inline void top(const Step& s, float* scratch) {
    const auto n = static_cast<int64_t>(s.scalar);
    EACH_ROW(s) {
        const float* a = scratch + row_of(s.a, i, j);
        float* out = scratch + row_of(s.out, i, j);
        for (int64_t k = 0; k < s.dims[2]; ++k) {
            int64_t best = -1;
            for (int64_t c = 0; c < n; ++c) {
                if (best >= 0 && !(a[c] > a[best])) continue;
                bool taken = false;
                for (int64_t t = 0; t < k && !taken; ++t) taken = out[t] == static_cast<float>(c);
                if (!taken) best = c;
            }
            out[k] = static_cast<float>(best);
        }
    }
}

template <class R>
void pick(const Step& s, float* scratch) {
    const auto last = static_cast<int64_t>(s.scalar) - 1;
    EACH_ROW(s) {
        const float* a = scratch + row_of(s.a, i, j);
        const float* places = scratch + row_of(s.b, i, j);
        float* out = scratch + row_of(s.out, i, j);
        for (int64_t k = 0; k < s.dims[2]; ++k) {
            const auto place = static_cast<int64_t>(places[k * s.b.stride[2]]);
            out[k] = R::round(a[place < 0 ? 0 : place > last ? last : place]);
        }
    }
}

inline void mark(const Step& s, float* scratch) {
    const auto count = static_cast<int64_t>(s.scalar);
    EACH_ROW(s) {
        const float* places = scratch + row_of(s.a, i, j);
        float* out = scratch + row_of(s.out, i, j);
        for (int64_t k = 0; k < s.dims[2]; ++k) out[k] = 0.0f;
        for (int64_t c = 0; c < count; ++c)
            if (places[c] >= 0 && places[c] < static_cast<float>(s.dims[2]))
                out[static_cast<int64_t>(places[c])] = 1.0f;
    }
}

inline void fill(const Step& s, float* scratch) {
    EACH_ROW(s) {
        const float* a = scratch + row_of(s.a, i, j);
        const float* b = scratch + row_of(s.b, i, j);
        float* out = scratch + row_of(s.out, i, j);
        for (int64_t k = 0; k < s.dims[2]; ++k) out[k] = b[k * s.b.stride[2]] != 0 ? s.scalar : a[k * s.a.stride[2]];
    }
}

inline void load_f32(int64_t n, const char* in, float* out) { std::memcpy(out, in, n * sizeof(float)); }
inline void store_f32(int64_t n, const float* in, char* out) { std::memcpy(out, in, n * sizeof(float)); }

inline void load_bf16(int64_t n, const char* in, float* __restrict out) {
    const auto* __restrict x = reinterpret_cast<const uint16_t*>(in);
    for (int64_t k = 0; k < n; ++k) out[k] = from_bf16(x[k]);
}

// Reduces numbers that are rounded already.
inline void store_bf16(int64_t n, const float* __restrict in, char* out) {
    auto* __restrict x = reinterpret_cast<uint16_t*>(out);
    for (int64_t k = 0; k < n; ++k) x[k] = static_cast<uint16_t>(bits<uint32_t>(in[k]) >> 16);
}

inline void load_i8(int64_t n, const char* in, float* __restrict out) {
    const auto* __restrict x = reinterpret_cast<const int8_t*>(in);
    for (int64_t k = 0; k < n; ++k) out[k] = x[k];
}

// Returns the nearest whole number from -127 to 127, ties to even.
inline void store_i8(int64_t n, const float* __restrict in, char* out) {
    auto* __restrict x = reinterpret_cast<int8_t*>(out);
    for (int64_t k = 0; k < n; ++k) {
        const float near = rounded(in[k]);
        x[k] = static_cast<int8_t>(static_cast<int32_t>(near > 127.0f ? 127.0f : near < -127.0f ? -127.0f : near));
    }
}

inline void add_f32(int64_t n, const char* in, char* out) {
    const auto* __restrict x = reinterpret_cast<const float*>(in);
    auto* __restrict y = reinterpret_cast<float*>(out);
    for (int64_t k = 0; k < n; ++k) y[k] += x[k];
}

inline void add_bf16(int64_t n, const char* in, char* out) {
    const auto* __restrict x = reinterpret_cast<const uint16_t*>(in);
    auto* __restrict y = reinterpret_cast<uint16_t*>(out);
    for (int64_t k = 0; k < n; ++k)
        y[k] = static_cast<uint16_t>(bits<uint32_t>(round_bf16(from_bf16(y[k]) + from_bf16(x[k]))) >> 16);
}

inline void load_i64(int64_t n, const char* in, float* __restrict out) {
    const auto* __restrict x = reinterpret_cast<const int64_t*>(in);
    for (int64_t k = 0; k < n; ++k) out[k] = static_cast<float>(x[k]);
}

// Of whole numbers.
inline void store_i64(int64_t n, const float* __restrict in, char* out) {
    auto* __restrict x = reinterpret_cast<int64_t*>(out);
    for (int64_t k = 0; k < n; ++k) x[k] = static_cast<int64_t>(in[k]);
}

inline float neg_f(float x) { return -x; }
inline float sqrt_f(float x) { return std::sqrt(x); }
inline float rsqrt_f(float x) { return 1.0f / std::sqrt(x); }
inline float reciprocal_f(float x) { return 1.0f / x; }
inline float relu_f(float x) { return x < 0 ? 0.0f : x; }
inline float sub_f(float x, float y) { return x - y; }
inline float mul_f(float x, float y) { return x * y; }
inline float div_f(float x, float y) { return x / y; }
inline float minimum_f(float x, float y) { return x > y ? y : x; }

#define UNARY(f) {unary<Float, f>, unary<Bfloat, f>}
#if defined(__AVX512F__)
#define GATE(f) {unary_row<Float, of_row<f>>, unary_row<Bfloat, of_row<f>>}
#else
#define GATE(f) UNARY(f##_f)
#endif
#define BINARY(f) {binary<Float, f>, binary<Bfloat, f>}

// The table must be a constant: computing it when the library is loaded would run these instructions on every CPU.
// forms: In the order of WeightForm.
constexpr KernelTable make_table(const char* name, Products products = {}, std::array<FormKernels, kForms> forms = {}) {
    return {name,
            {{nullptr, nullptr},
             {nullptr, nullptr},
             {copy<Float>, copy<Bfloat>},
             UNARY(neg_f),
             BINARY(add_f),
             BINARY(sub_f),
             BINARY(mul_f),
             BINARY(div_f),
             UNARY(sqrt_f),
             UNARY(rsqrt_f),
             UNARY(reciprocal_f),
             UNARY(exp_f),
             UNARY(tanh_f),
             UNARY(sigmoid_f),
             GATE(silu),
             UNARY(gelu_f),
             GATE(gelu_tanh),
             UNARY(relu_f),
             UNARY(softplus_f),
             BINARY(minimum_f),
             BINARY(maximum_f),
             {reduce<Float, sum_of>, reduce<Bfloat, sum_of>},
             {reduce<Float, peak_of>, reduce<Bfloat, peak_of>},
             {rotate<Float>, rotate<Bfloat>},
             {reduce<Float, most_of>, reduce<Bfloat, most_of>},
             {top, top},
             {pick<Float>, pick<Bfloat>},
             {mark, mark},
             {fill, fill}},
            {load_f32, load_bf16, load_i8, load_i64},
            {store_f32, store_bf16, store_i8, store_i64},
            {add_f32, add_bf16},
            products,
            forms,
            largest,
            weigh,
            sums_from,
            sum_from};
}

#undef UNARY
#undef GATE
#undef BINARY
#undef EACH_ROW

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
