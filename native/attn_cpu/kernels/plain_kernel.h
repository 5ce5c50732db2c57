// Scores and weighted values in plain fp32 over any stored type. Included inside the namespace of one ISA.
constexpr int pow2_below(int x) { return x >= 8 ? 8 : x >= 4 ? 4 : x >= 2 ? 2 : 1; }

struct Tiles {
    const uint8_t* k[kTilesPerChunk];
    const uint8_t* v[kTilesPerChunk];
    const uint8_t* k_scales[kTilesPerChunk];
    const uint8_t* v_scales[kTilesPerChunk];
    const uint8_t* next_k;  // K that comes after this V
    size_t k_step;          // between units of a K tile
    size_t v_step;          // between runs of tokens of a V tile
    int first, last;        // tiles of this chunk that hold visible tokens
};

template <class Store>
inline void prefetch_unit(const uint8_t* p) {
    for (int line = 0; line < Store::kUnitBytes; line += 64) prefetch(p + line);
}

inline void add_weights(const F* p, float* sums) {
    for (int j = 0; j < kVecs; ++j) {
        F x = vload(sums + j * W);
        for (int t = 0; t < kTilesPerChunk; ++t) x = vadd(x, p[t * kVecs + j]);
        vstore(sums + j * W, x);
    }
}

template <class Store>
struct PlainKernel {
    using Storage = Store;
    // Rows of a pass. Unpacking costs more than reading from the cache again, so all rows share it.
    static constexpr int kPass = Store::kScaled ? kMaxRows : kPassRows, kWide = Store::kScaled ? kMaxRows : kWideRows;
    using Query = float;
    static constexpr size_t kQueryBytes = 4;  // per element
    static constexpr int kQueryStep = 2;      // query elements of one row in a unit
    static constexpr int kRegisters = kAccs;
    static constexpr int kPairs = Store::kSteps / 2;
    static inline F exp2(F t) { return vexp2(t); }

    // q[unit][row][2]
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        float* q = reinterpret_cast<float*>(dst);
        const HeadLayout& l = *a.kv.layout;
        for (int r = 0; r < MR; ++r) {
            const int row = a.first_row + row0 + r;
            const int64_t base =
                (row / a.group) * a.q_stride + static_cast<int64_t>(head * a.group + row % a.group) * l.k_dim;
            for (int d = 0; d < l.k_pad; ++d)
                q[((d / 2) * MR + r) * 2 + d % 2] = d < l.k_dim ? load_act(a.q, a.type, base + d) : 0.0f;
        }
    }

    // Rows MR of the `stride` prepared; prefetches kShare units for every TT it reads, in the order they lie.
    template <int MR, int TT, int kShare>
    static inline void score_pass(const Tiles& tiles, int first, const float* q, int stride, int units,
                                  const uint8_t* ahead, float* s) {
        F acc[MR][TT * kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT * kVecs; ++t) acc[r][t] = vzero();
        }
        for (int u = 0; u < units; ++u, q += stride * Store::kSteps, ahead += kShare * Store::kUnitBytes) {
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) {
                if (t < kShare) prefetch_unit<Store>(ahead + t * Store::kUnitBytes);
#pragma GCC unroll 4
                for (int j = 0; j < kVecs; ++j) {
#pragma GCC unroll 4
                    for (int pair = 0; pair < kPairs; ++pair) {
                        F a, b;
                        Store::load(tiles.k[first + t] + u * tiles.k_step, j, pair, a, b);
                        const float* y = q + pair * stride * 2;
#pragma GCC unroll 8
                        for (int r = 0; r < MR; ++r) {
                            F& x = acc[r][t * kVecs + j];
                            x = vfma(b, vset(y[r * 2 + 1]), vfma(a, vset(y[r * 2]), x));
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT * kVecs; ++t) vstore(s + r * kChunk + t * W, acc[r][t]);
        }
    }

    static inline void store(const F* p, float* out) {
        for (int i = 0; i < kTilesPerChunk * kVecs; ++i) vstore(out + i * W, p[i]);
    }

    // Adds the weights of one row to its 16 partial sums and leaves them as `value_pass` reads them.
    static inline void emit(const F* p, float* sums, float* out) {
        add_weights(p, sums);
        store(p, out);
    }

    // NC runs of 16 dims from run `first` on; prefetches kShare units for every NC it reads.
    template <int MR, int NC, int kShare>
    static inline void value_pass(const Tiles& tiles, int first, const float* p, const uint8_t* ahead, float* acc,
                                  int v_pad) {
        F o[MR][NC * kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC * kVecs; ++c) o[r][c] = vload(acc + r * v_pad + c * W);
        }
        for (int t = tiles.first; t < tiles.last; ++t) {
            const uint8_t* v = tiles.v[t] + first * Store::kUnitBytes;
            const float* w = p + t * kTile;
            for (int u = 0; u < kTile; u += Store::kSteps, v += tiles.v_step, ahead += kShare * Store::kUnitBytes) {
#pragma GCC unroll 8
                for (int c = 0; c < NC; ++c) {
                    if (c < kShare) prefetch_unit<Store>(ahead + c * Store::kUnitBytes);
#pragma GCC unroll 4
                    for (int j = 0; j < kVecs; ++j) {
#pragma GCC unroll 4
                        for (int pair = 0; pair < kPairs; ++pair) {
                            F a, b;
                            Store::load(v + c * Store::kUnitBytes, j, pair, a, b);
                            const float* y = w + u + pair * 2;
#pragma GCC unroll 8
                            for (int r = 0; r < MR; ++r) {
                                F& x = o[r][c * kVecs + j];
                                x = vfma(b, vset(y[r * kChunk + 1]), vfma(a, vset(y[r * kChunk]), x));
                            }
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC * kVecs; ++c) vstore(acc + r * v_pad + c * W, o[r][c]);
        }
    }
};
