// Scores and weighted values of int8 and int4 by byte quad products (AVX512_VNNI), without unpacking to floats.
//
// Queries become 15-bit and weights 16-bit whole numbers, each a high byte * 256 plus a low byte. A query row has a
// power of two as its scale; so have the 64 weights of a row and chunk. Sums of products are exact.
#pragma once
#include "plain_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

inline __m512i bytes_of_16(uint32_t quad) { return _mm512_set1_epi32(static_cast<int>(quad)); }

// Computes acc += u * s over quads of bytes, with u unsigned. GCC 12 copies and spills the accumulators of the
// intrinsic.
inline void add_quads(__m512i& acc, __m512i u, __m512i s) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s)); }

// Returns 2^(bits - e) for |x| in [2^e, 2^(e+1)), and some finite power for tiny, infinite or undefined x.
inline float up_scale(float x, uint32_t bits) {
    uint32_t b;
    __builtin_memcpy(&b, &x, 4);
    b = (b >> 23) & 0xff;
    b = (254 + bits - (b > 20 ? b : 20)) << 23;
    float y;
    __builtin_memcpy(&y, &b, 4);
    return y;
}

// The first operand of a quad product is unsigned, so K carries a bias. Its product with the query is subtracted.
inline __m512i k_quad(StoreI8, const uint8_t* p, int) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)));
}
inline __m512i k_quad(StoreI4, const uint8_t* p, int half) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), half * 4), _mm512_set1_epi8(15));
}
inline __m512i v_quad(StoreI8, const uint8_t* p, int) { return _mm512_loadu_si512(p); }
inline __m512i v_quad(StoreI4, const uint8_t* p, int half) {
    return _mm512_sub_epi8(k_quad(StoreI4(), p, half), _mm512_set1_epi8(8));
}

template <class Store>
struct QuadKernel : VectorKernel {
    using Storage = Store;
    static constexpr size_t kQueryBytes = 4;  // per element; half of it quads, the rest for biases and scales
    static constexpr int kSums = 2;           // accumulators of a row and unit: high and low
    static constexpr int kQuads = Store::kSteps / 4;
    static constexpr int kBias = Store::kLevels == 7 ? 8 : 128;
    static inline F exp2(F t) { return vexp2_coarse(t); }

    // Writes [k_pad / 4 quads][row]{high, low}, [row]{bias of high, of low}, [row]{scale, unused}.
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        const int quads = a.kv.layout->k_pad / 4;
        for (int r = 0; r < MR; ++r) {
            const int64_t base = query_at(a, head, row0 + r);
            const Query query = split_row(a, base, dst + r * 8, MR * 8, 4, quads);
            __builtin_memcpy(dst + quads * MR * 8 + r * 8, query.bias, 8);
            __builtin_memcpy(dst + (quads + 1) * MR * 8 + r * 8, &query.scale, 4);
        }
    }

    struct Query {
        int32_t bias[2];  // of high, of low
        float scale;
    };

    // Returns dims [d, d + 16) of a query row, zero from k_dim on.
    static inline F query_dims(const AttendArgs& a, int64_t base, int d) {
        const int n = a.kv.layout->k_dim - d;
        if (n >= W) {
            return a.type == ActType::kF32 ? vload(static_cast<const float*>(a.q) + base + d)
                                           : load_bf16(static_cast<const uint16_t*>(a.q) + base + d);
        }
        float lanes[W] = {};
        for (int i = 0; i < n; ++i) lanes[i] = load_act(a.q, a.type, base + d + i);
        return vload(lanes);
    }

    // Writes quad i of the high bytes to dst + i * stride, and that of the low bytes `low_at` bytes behind it.
    static Query split_row(const AttendArgs& a, int64_t base, uint8_t* dst, size_t stride, size_t low_at, int quads) {
        const int k_dim = a.kv.layout->k_dim;
        F top = vzero();
        __mmask16 strange = 0;
        for (int d = 0; d < k_dim; d += W) {
            const F x = query_dims(a, base, d);
            top = vmax(top, _mm512_abs_ps(x));
            strange |= _mm512_cmp_ps_mask(vsub(x, x), vzero(), _CMP_NEQ_UQ);
        }
        const float up = up_scale(hmax(top), 13);
        __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
        for (int d = 0; d < quads * 4; d += W) {
            const F scaled = vmul(d < k_dim ? query_dims(a, base, d) : vzero(), vset(up));
            const __m512i x = strange ? _mm512_setzero_si512() : _mm512_cvtps_epi32(scaled);
            const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24);
            const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(x, low), 8);
            high_sum = _mm512_add_epi32(high_sum, high);
            low_sum = _mm512_add_epi32(low_sum, low);
            uint32_t halves[2][4];
            _mm_storeu_si128(reinterpret_cast<__m128i*>(halves[0]), _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(halves[1]), _mm512_cvtepi32_epi8(low));
            for (int i = 0; i < 4 && d / 4 + i < quads; ++i) {
                __builtin_memcpy(dst + (d / 4 + i) * stride, &halves[0][i], 4);
                __builtin_memcpy(dst + (d / 4 + i) * stride + low_at, &halves[1][i], 4);
            }
        }
        return {{-kBias * _mm512_reduce_add_epi32(high_sum), -kBias * _mm512_reduce_add_epi32(low_sum)},
                strange ? __builtin_nanf("") : 1.0f / up};
    }

    template <int MR, int TT>
    static __attribute__((noinline)) void score_pass(const Tiles& tiles, int first, const uint8_t* rows, int k_pad,
                                                     Ahead& shared, float* s) {
        const uint32_t* q = reinterpret_cast<const uint32_t*>(rows);
        const int units = k_pad / Store::kSteps;
        const uint32_t* bias = q + static_cast<size_t>(units) * kQuads * MR * 2;
        Ahead ahead = shared;
        __m512i high[MR][TT], low[MR][TT];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) {
                high[r][t] = bytes_of_16(bias[r * 2]);
                low[r][t] = bytes_of_16(bias[r * 2 + 1]);
            }
        }
        for (int u = 0; u < units; ++u) {
            ahead.advance<true, TT * Store::kUnitBytes>();
#pragma GCC unroll 2
            for (int i = 0; i < kQuads; ++i, q += MR * 2) {
                __m512i x[TT];
#pragma GCC unroll 4
                for (int t = 0; t < TT; ++t) x[t] = k_quad(Store(), tiles.k[first + t] + u * tiles.k_step, i);
#pragma GCC unroll 8
                for (int r = 0; r < MR; ++r) {
                    const __m512i h = bytes_of_16(q[r * 2]), y = bytes_of_16(q[r * 2 + 1]);
#pragma GCC unroll 4
                    for (int t = 0; t < TT; ++t) {
                        add_quads(high[r][t], x[t], h);
                        add_quads(low[r][t], x[t], y);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            float scale;
            __builtin_memcpy(&scale, bias + (MR + r) * 2, 4);
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) {
                const F h = _mm512_cvtepi32_ps(high[r][t]), y = _mm512_cvtepi32_ps(low[r][t]);
                vstore(s + r * kChunk + t * W, vmul(vfma(h, vset(256.0f), y), vset(scale)));
            }
        }
        shared = ahead;
    }

    // Writes the high and the low bytes of 64 weights as whole numbers; returns their scale. Quad i of tile t becomes
    // quad i * 4 + t, as packing leaves them.
    static inline float packed(const F* p, __m512i* out) {
        const float up = up_scale(hmax(vmax(vmax(p[0], p[1]), vmax(p[2], p[3]))), 15);
        __m512i x[kTilesPerChunk];
#pragma GCC unroll 4
        for (int t = 0; t < kTilesPerChunk; ++t) x[t] = _mm512_cvtps_epi32(vmul(p[t], vset(up)));
        const __m512i a = _mm512_packus_epi32(x[0], x[1]), b = _mm512_packus_epi32(x[2], x[3]);
        const __m512i byte = _mm512_set1_epi16(255);
        out[0] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        out[1] = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        return 1.0f / up;
    }

    // out: 64 high bytes, 64 low bytes, the scale
    static inline void store(const F* p, float* out) {
        __m512i bytes[2];
        out[2 * kChunk / 4] = packed(p, bytes);
        _mm512_storeu_si512(out, bytes[0]);
        _mm512_storeu_si512(out + kChunk / 4, bytes[1]);
    }
    static inline void emit(const F* p, float* sums, float* out) {
        add_weights(p, sums);
        store(p, out);
    }

    template <int MR, int NC>
    static __attribute__((noinline)) void value_pass(const Tiles& tiles, int first, const float* p, Ahead& shared,
                                                     float* acc, int v_pad) {
        Ahead ahead = shared;
        acc += first * kTile;
        constexpr int kRow = kChunk * sizeof(float);
        const uint8_t* w = reinterpret_cast<const uint8_t*>(p);
        __m512i high[MR][NC], low[MR][NC];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < NC; ++c) high[r][c] = low[r][c] = _mm512_setzero_si512();
        }
        for (int t = tiles.first; t < tiles.last; ++t) {
            const Columns<Store, NC> v(tiles, t, first);
            for (int u = 0; u < kTile / Store::kSteps; ++u) {
                ahead.advance<true, NC * Store::kUnitBytes>();
#pragma GCC unroll 2
                for (int i = 0; i < kQuads; ++i) {
                    __m512i x[NC];
#pragma GCC unroll 8
                    for (int c = 0; c < NC; ++c) x[c] = v_quad(Store(), v.unit(u, c), i);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; ++r) {
                        uint32_t quad[2];
                        const uint8_t* at = w + r * kRow + (u * kQuads + i) * kTile + t * 4;
                        __builtin_memcpy(quad, at, 4);
                        __builtin_memcpy(quad + 1, at + kChunk, 4);
                        const __m512i h = bytes_of_16(quad[0]), y = bytes_of_16(quad[1]);
#pragma GCC unroll 8
                        for (int c = 0; c < NC; ++c) {
                            add_quads(high[r][c], h, x[c]);
                            add_quads(low[r][c], y, x[c]);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const F scale = vset(p[r * kChunk + 2 * kChunk / 4]);
#pragma GCC unroll 8
            for (int c = 0; c < NC; ++c) {
                float* o = acc + r * v_pad + c * W;
                const F sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][c], 8), low[r][c]));
                vstore(o, vfma(sum, scale, vload(o)));
            }
        }
        shared = ahead;
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
