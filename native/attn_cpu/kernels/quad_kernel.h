// Scores and weighted values of whole numbers by byte quad products (AVX512_VNNI), without unpacking to floats.
//
// Queries become 15-bit and weights 16-bit whole numbers, each a high byte * 256 plus a low byte, for fine types
// (KvStore); for others both become bytes. A query row has a scale; so have the 64 weights of a row and chunk, a power
// of two. Sums of products are exact.
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
inline __m512i k_quad(StoreI6, const uint8_t* p, int i) {
    const __m512i two = _mm512_loadu_si512(p + StoreI6::kLowBytes);
    const __m512i up = i < 2 ? _mm512_slli_epi16(two, 4 - 2 * i) : _mm512_srli_epi16(two, 2 * i - 4);
    const __m512i low = k_quad(StoreI4(), p + i / 2 * StoreI4::kUnitBytes, i % 2);
    return _mm512_ternarylogic_epi32(low, up, _mm512_set1_epi8(48), 0xf8);  // low | (up & 48)
}
inline __m512i v_quad(StoreI8, const uint8_t* p, int) { return _mm512_loadu_si512(p); }
inline __m512i v_quad(StoreI4, const uint8_t* p, int half) {
    return _mm512_sub_epi8(k_quad(StoreI4(), p, half), _mm512_set1_epi8(8));
}

template <class Store>
struct QuadKernel : VectorKernel {
    using Storage = Store;
    static constexpr size_t kQueryBytes = 4;  // per element; half of it quads, the rest for biases and scales
    static constexpr bool kFine = Store::kFine;
    static constexpr int kRows = kFine ? kMaxRows / 2 : kMaxRows;  // of one pass, for two tiles at once
    static constexpr int kParts = kFine ? 2 : 1;  // bytes of a whole number: high and low, or all of it
    static constexpr int kSums = kParts;          // accumulators of a row and unit
    using K = typename Store::K;
    using V = typename Store::V;
    static constexpr int kQuads = K::kSteps / 4;
    static constexpr int kBias = K::kLow == -127 ? 128 : -K::kLow;
    static inline F exp2(F t) { return vexp2_coarse(t); }

    // Writes [k_pad / 4 quads][row][kParts], [row][kParts] biases, [row] scales.
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        const int quads = a.kv.layout->k_pad / 4;
        constexpr size_t kPart = 4 * kParts;
        for (int r = 0; r < MR; ++r) {
            const int64_t base = query_at(a, head, row0 + r);
            const Query query = split_row(a, base, dst + r * kPart, MR * kPart, 4, quads);
            __builtin_memcpy(dst + (quads * MR + r) * kPart, query.bias, kPart);
            __builtin_memcpy(dst + (quads + 1) * MR * kPart + r * 4, &query.scale, 4);
        }
    }

    struct Query {
        int32_t bias[2];  // of high, of low; or of all
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
        const float largest = hmax(top) > 0x1p-100f ? hmax(top) : 0x1p-100f;
        const float up = kFine ? up_scale(hmax(top), 13) : 127.0f / largest;
        __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        const auto write = [&](__m512i x, int part, int d) {
            sums[part] = _mm512_add_epi32(sums[part], x);
            uint32_t quad[4];
            _mm_storeu_si128(reinterpret_cast<__m128i*>(quad), _mm512_cvtepi32_epi8(x));
            for (int i = 0; i < 4 && d / 4 + i < quads; ++i)
                __builtin_memcpy(dst + (d / 4 + i) * stride + part * low_at, &quad[i], 4);
        };
        for (int d = 0; d < quads * 4; d += W) {
            const F scaled = vmul(d < k_dim ? query_dims(a, base, d) : vzero(), vset(up));
            const __m512i x = strange ? _mm512_setzero_si512() : _mm512_cvtps_epi32(scaled);
            if constexpr (kFine) {
                const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24);
                write(_mm512_srai_epi32(_mm512_sub_epi32(x, low), 8), 0, d);
                write(low, 1, d);
            } else {
                write(x, 0, d);
            }
        }
        return {{-kBias * _mm512_reduce_add_epi32(sums[0]), -kBias * _mm512_reduce_add_epi32(sums[1])},
                strange ? __builtin_nanf("") : 1.0f / up};
    }

    // Returns the number whose parts these are.
    static inline F whole(const __m512i* parts) {
        if constexpr (kFine) return vfma(_mm512_cvtepi32_ps(parts[0]), vset(256.0f), _mm512_cvtepi32_ps(parts[1]));
        return _mm512_cvtepi32_ps(parts[0]);
    }

    template <int MR, int TT>
    static __attribute__((noinline)) void score_pass(const Tiles& tiles, int first, const uint8_t* rows, int k_pad,
                                                     Ahead& shared, float* s) {
        const uint32_t* q = reinterpret_cast<const uint32_t*>(rows);
        const int units = k_pad / K::kSteps;
        const uint32_t* bias = q + static_cast<size_t>(units) * kQuads * MR * kParts;
        Ahead ahead = shared;
        __m512i sums[MR][TT][kParts];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) {
#pragma GCC unroll 2
                for (int p = 0; p < kParts; ++p) sums[r][t][p] = bytes_of_16(bias[r * kParts + p]);
            }
        }
        for (int u = 0; u < units; ++u) {
            ahead.advance<(MR > kPrefetching.unaided_rows), TT * K::kUnitBytes>();
#pragma GCC unroll 8
            for (int i = 0; i < kQuads; ++i, q += MR * kParts) {
                __m512i x[TT];
#pragma GCC unroll 4
                for (int t = 0; t < TT; ++t) x[t] = k_quad(K(), tiles.k[first + t] + u * tiles.k_step, i);
#pragma GCC unroll 8
                for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
                    for (int p = 0; p < kParts; ++p) {
                        const __m512i y = bytes_of_16(q[r * kParts + p]);
#pragma GCC unroll 4
                        for (int t = 0; t < TT; ++t) add_quads(sums[r][t][p], x[t], y);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            float scale;
            __builtin_memcpy(&scale, bias + MR * kParts + r, 4);
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) vstore(s + r * kChunk + t * W, vmul(whole(sums[r][t]), vset(scale)));
        }
        shared = ahead;
    }

    // Writes the parts of 64 weights as whole numbers; returns their scale. Quad i of tile t becomes quad i * 4 + t, as
    // packing leaves them.
    static inline float packed(const F* p, __m512i* out) {
        const float up = up_scale(hmax(vmax(vmax(p[0], p[1]), vmax(p[2], p[3]))), kFine ? 15 : 7);
        __m512i x[kTilesPerChunk];
#pragma GCC unroll 4
        for (int t = 0; t < kTilesPerChunk; ++t) x[t] = _mm512_cvtps_epi32(vmul(p[t], vset(up)));
        const __m512i a = _mm512_packus_epi32(x[0], x[1]), b = _mm512_packus_epi32(x[2], x[3]);
        if constexpr (kFine) {
            const __m512i byte = _mm512_set1_epi16(255);
            out[0] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
            out[1] = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        } else {
            out[0] = _mm512_packus_epi16(a, b);
        }
        return 1.0f / up;
    }

    // out: 64 bytes of every part, the scale
    static inline void store(const F* p, float* out) {
        __m512i bytes[kParts];
        out[kParts * kChunk / 4] = packed(p, bytes);
        for (int i = 0; i < kParts; ++i) _mm512_storeu_si512(out + i * kChunk / 4, bytes[i]);
    }
    static inline void emit(const F* p, float* sums, float* out) {
        add_weights(p, sums);
        store(p, out);
    }

    // Returns the number whose parts these sums are, exactly.
    static inline F whole_sum(const __m512i* parts) {
        if constexpr (kFine) return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(parts[0], 8), parts[1]));
        return _mm512_cvtepi32_ps(parts[0]);
    }

    template <int MR, int NC>
    static __attribute__((noinline)) void value_pass(const Tiles& tiles, int first, const float* p, Ahead& shared,
                                                     float* acc, int v_pad) {
        Ahead ahead = shared;
        acc += first * kTile;
        constexpr int kRow = kChunk * sizeof(float), kQuadsOfV = V::kSteps / 4;
        const uint8_t* w = reinterpret_cast<const uint8_t*>(p);
        __m512i sums[MR][NC][kParts];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < NC; ++c) {
#pragma GCC unroll 2
                for (int part = 0; part < kParts; ++part) sums[r][c][part] = _mm512_setzero_si512();
            }
        }
        for (int t = tiles.first; t < tiles.last; ++t) {
            const Columns<V, NC> v(tiles, t, first);
            for (int u = 0; u < kTile / V::kSteps; ++u) {
                ahead.advance<(MR > kPrefetching.unaided_rows), NC * V::kUnitBytes>();
#pragma GCC unroll 2
                for (int i = 0; i < kQuadsOfV; ++i) {
                    __m512i x[NC];
#pragma GCC unroll 8
                    for (int c = 0; c < NC; ++c) x[c] = v_quad(V(), v.unit(u, c), i);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
                        for (int part = 0; part < kParts; ++part) {
                            uint32_t quad;
                            __builtin_memcpy(&quad, w + r * kRow + part * kChunk + (u * kQuadsOfV + i) * kTile + t * 4,
                                             4);
                            const __m512i y = bytes_of_16(quad);
#pragma GCC unroll 8
                            for (int c = 0; c < NC; ++c) add_quads(sums[r][c][part], y, x[c]);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const F scale = vset(p[r * kChunk + kParts * kChunk / 4]);
#pragma GCC unroll 8
            for (int c = 0; c < NC; ++c) {
                float* o = acc + r * v_pad + c * W;
                vstore(o, vfma(whole_sum(sums[r][c]), scale, vload(o)));
            }
        }
        shared = ahead;
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
