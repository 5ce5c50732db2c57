// Scores and weighted values in plain fp32 over any stored type. Included inside the namespace of one ISA.
constexpr int pow2_below(int x) { return x >= 8 ? 8 : x >= 4 ? 4 : x >= 2 ? 2 : 1; }

struct Tiles {
    const uint8_t* k[kTilesPerChunk];
    const uint8_t* v[kTilesPerChunk];
    const uint8_t* next[kTilesPerChunk];  // K tiles that come after these V tiles
    int first, last;                      // tiles of this chunk that hold visible tokens
    bool in_row;                          // the four tiles of a chunk lie in a row
};

// The hardware prefetcher follows straight lines only, so what comes next is prefetched in the order it lies, a unit for
// every unit computed. Tiles that do not lie in a row are followed one by one.
struct Ahead {
    const uint8_t* from[kTilesPerChunk];
    size_t step, lane;  // bytes between steps, and between lanes that share one `from`
};

// Tiles first .. first + TT of K are being read: V comes next.
template <int kUnit, int TT>
inline Ahead ahead_of_scores(const Tiles& tiles, int first, int units) {
    Ahead a;
    a.lane = kUnit;
    a.step = tiles.in_row ? TT * kUnit : kUnit;
    const uint8_t* row = tiles.v[0] + static_cast<size_t>(first) * units * kUnit;
    for (int t = 0; t < TT; ++t) a.from[t] = tiles.in_row ? row + t * kUnit : tiles.v[first + t];
    return a;
}

// Chunks first .. first + NC of V tile t are being read: the next K comes next.
template <int kUnit, int NC>
inline Ahead ahead_of_values(const Tiles& tiles, int first, int t) {
    constexpr size_t kChunkBytes = static_cast<size_t>(kTile / 2) * kUnit;
    Ahead a;
    a.step = tiles.in_row ? NC * kUnit : kUnit;
    a.lane = tiles.in_row ? kUnit : kChunkBytes;
    a.from[0] = tiles.in_row ? tiles.next[0] + (first * kTilesPerChunk + t * NC) * kChunkBytes
                             : tiles.next[t] + first * kChunkBytes;
    return a;
}

template <class Store>
inline void prefetch_unit(const uint8_t* p) {
    for (int line = 0; line < Store::kUnitBytes; line += 64) prefetch(p + line);
}

template <class Store>
struct PlainKernel {
    using Storage = Store;
    using Query = float;
    static constexpr size_t kQueryBytes = 4;  // per element
    static constexpr size_t kValueChunk = static_cast<size_t>(kTile / 2) * Store::kUnitBytes;
    static inline F exp2(F t) { return vexp2(t); }

    // q[unit][row][2]
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        float* q = reinterpret_cast<float*>(dst);
        const HeadLayout& l = *a.kv.layout;
        for (int r = 0; r < MR; ++r) {
            const int row = a.first_row + row0 + r;
            const int64_t base = (row / a.group) * a.q_stride + static_cast<int64_t>(head * a.group + row % a.group) * l.k_dim;
            for (int d = 0; d < l.k_pad; ++d)
                q[((d / 2) * MR + r) * 2 + d % 2] = d < l.k_dim ? load_act(a.q, a.type, base + d) : 0.0f;
        }
    }

    template <int MR, int TT>
    static inline void score_pass(const Tiles& tiles, int first, const float* q, int units, float* s) {
        const Ahead ahead = ahead_of_scores<Store::kUnitBytes, TT>(tiles, first, units);
        const uint8_t* const* k = tiles.k + first;
        F acc[MR][TT * kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT * kVecs; ++t) acc[r][t] = vzero();
        }
        for (int u = 0; u < units; ++u, q += MR * 2) {
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) {
#pragma GCC unroll 4
                for (int j = 0; j < kVecs; ++j) {
                    F a, b;
                    Store::load(k[t] + static_cast<size_t>(u) * Store::kUnitBytes, j, a, b);
                    if (j == 0) prefetch_unit<Store>(ahead.from[t] + u * ahead.step);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; ++r) {
                        F& x = acc[r][t * kVecs + j];
                        x = vfma(b, vset(q[r * 2 + 1]), vfma(a, vset(q[r * 2]), x));
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

    // Turns the weights of one row into what `values` reads and adds them to the row's 16 partial sums.
    static inline void emit(const F* p, float* sums, float* out) {
        for (int j = 0; j < kVecs; ++j) {
            F x = vload(sums + j * W);
            for (int t = 0; t < kTilesPerChunk; ++t) {
                x = vadd(x, p[t * kVecs + j]);
                vstore(out + (t * kVecs + j) * W, p[t * kVecs + j]);
            }
            vstore(sums + j * W, x);
        }
    }

    template <int MR, int NC>
    static inline void value_pass(const Tiles& tiles, int first, const float* p, float* acc, int v_pad) {
        F o[MR][NC * kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC * kVecs; ++c) o[r][c] = vload(acc + r * v_pad + c * W);
        }
        for (int t = tiles.first; t < tiles.last; ++t) {
            const uint8_t* v = tiles.v[t] + static_cast<size_t>(first) * kValueChunk;
            const Ahead ahead = ahead_of_values<Store::kUnitBytes, NC>(tiles, first, t);
            for (int u = 0; u < kTile / 2; ++u) {
                const float* w = p + t * kTile + u * 2;
#pragma GCC unroll 8
                for (int c = 0; c < NC; ++c) {
#pragma GCC unroll 4
                    for (int j = 0; j < kVecs; ++j) {
                        F a, b;
                        const size_t at = static_cast<size_t>(c * kTile / 2 + u) * Store::kUnitBytes;
                        Store::load(v + at, j, a, b);
                        if (j == 0) prefetch_unit<Store>(ahead.from[0] + u * ahead.step + c * ahead.lane);
#pragma GCC unroll 8
                        for (int r = 0; r < MR; ++r) {
                            F& x = o[r][c * kVecs + j];
                            x = vfma(b, vset(w[r * kChunk + 1]), vfma(a, vset(w[r * kChunk]), x));
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
