// 16 floats per vector. Included inside the namespace of one ISA.
constexpr int W = 16;
constexpr int kMaxRows = 8;    // query rows that share one pass over K or V
constexpr int kAccs = 16;      // accumulator registers of one pass
constexpr int kPassRows = 4;  // of these, in registers at once
using F = __m512;

inline F vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F vset(float x) { return _mm512_set1_ps(x); }
inline F vzero() { return _mm512_setzero_ps(); }
inline F vfma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F vadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F vsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F vdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline bool any_greater(F a, float b) { return _mm512_cmp_ps_mask(a, vset(b), _CMP_GT_OQ) != 0; }
inline float hmax(F a) { return _mm512_reduce_max_ps(a); }
inline float hsum(F a) { return _mm512_reduce_add_ps(a); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
    const __m512i x = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline F load_bf16(const uint16_t* p) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}

// Lanes outside [lo, hi) become -inf.
inline F keep_lanes(F a, int lo, int hi) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo)) &
                           _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(hi));
    return _mm512_mask_mov_ps(vset(-__builtin_inff()), keep, a);
}

// 2^n for whole n in [-126, 127], times a; zero where t < -126.
inline F scale_exp2(F a, F n, F t) {
    const __mmask16 keep = _mm512_cmp_ps_mask(t, vset(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(keep, a, n);
}
inline F vround(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
