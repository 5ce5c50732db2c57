// The driver of one work item: pieces of one KV head against its query rows. Included inside the namespace of one ISA.
//
// Weights are 2^(score * scale * log2 e - m) for a reference exponent m that is raised only when a score
// exceeds it by more than kSlack: no overflow is possible, and most chunks need neither a horizontal maximum nor a
// rescaled accumulator.
constexpr float kSlack = 8.0f;

inline uint8_t* carve(uint8_t*& p, size_t bytes) {
    uint8_t* at = p;
    p += (bytes + 63) / 64 * 64;
    return at;
}

template <class Kernel>
struct AttendItem {
    using Store = typename Kernel::Storage;

    // State of row r of head h lies at index h * rows + r.
    struct Rows {
        uint8_t* q;    // row tiles of kMaxRows
        float* m;      // reference exponent
        float* bound;  // score above which m is raised; -inf while empty
        float* sums;   // [16] each
        float* acc;    // [v_pad] each
        float* total;  // partials, folded so far
        float* s;      // [kMaxRows][64] scores
        float* p;      // [kMaxRows][64] weights as the kernel wants them
        uint8_t* k_tiles;
        uint8_t* v_tiles;
    };

    static Rows carve_rows(const AttendArgs& a) {
        const HeadLayout& l = *a.kv.layout;
        uint8_t* at = a.scratch;
        const size_t rows = static_cast<size_t>(a.heads) * a.rows, f = sizeof(float);
        Rows w;
        w.s = reinterpret_cast<float*>(carve(at, kMaxRows * kChunk * f));
        w.p = reinterpret_cast<float*>(carve(at, kMaxRows * kChunk * f));
        w.q = carve(at, rows * l.k_pad * f);
        w.m = reinterpret_cast<float*>(carve(at, rows * f));
        w.bound = reinterpret_cast<float*>(carve(at, rows * f));
        w.sums = reinterpret_cast<float*>(carve(at, rows * kTile * f));
        w.acc = reinterpret_cast<float*>(carve(at, rows * l.v_pad * f));
        w.total = reinterpret_cast<float*>(carve(at, rows * (2 + l.v_pad) * f));
        w.k_tiles = carve(at, kTilesPerChunk * l.k_tile);
        w.v_tiles = carve(at, kTilesPerChunk * l.v_tile);
        return w;
    }

    // Visible positions [lo, hi) of a row.
    struct Span {
        int64_t lo, hi;
    };
    static inline Span visible(const AttendArgs& a, int row) {
        const int64_t hi = a.length - a.new_tokens + (a.first_row + row) / a.group + 1;
        const int64_t lo = a.window > 0 && hi > a.window ? hi - a.window : 0;
        return {lo, hi};
    }

    // First head's K and V tiles of a chunk; tiles without visible tokens repeat a neighbour.
    struct ChunkTiles {
        const uint8_t* k[kTilesPerChunk];
        const uint8_t* v[kTilesPerChunk];
        const uint8_t* k_scales[kTilesPerChunk];
        const uint8_t* v_scales[kTilesPerChunk];
        int first, last;
    };

    static ChunkTiles locate(const AttendArgs& a, const Rows& w, int64_t base, Span seen) {
        const HeadLayout& l = *a.kv.layout;
        const int64_t end = seen.hi < base + kChunk ? seen.hi : base + kChunk;
        ChunkTiles t;
        t.first = seen.lo > base ? static_cast<int>((seen.lo - base) / kTile) : 0;
        t.last = static_cast<int>((end - base + kTile - 1) / kTile);
        for (int i = 0; i < kTilesPerChunk; ++i) {
            const int use = i < t.first ? t.first : i >= t.last ? t.last - 1 : i;
            if (l.tiles_per_block == 0) {
                t.k[i] = w.k_tiles + use * l.k_tile;
                t.v[i] = w.v_tiles + use * l.v_tile;
                t.k_scales[i] = t.k[i] + l.k_scales;
                t.v_scales[i] = t.v[i] + l.v_scales;
                continue;
            }
            const uint32_t tile = static_cast<uint32_t>(base / kTile + use), per = l.tiles_per_block;
            const uint8_t* block = a.kv.base + a.kv.blocks[tile / per] * a.kv.block_bytes;
            t.k[i] = block + k_tile_at<Store>(l, tile % per);
            t.v[i] = block + v_tile_at<Store>(l, tile % per);
            t.v_scales[i] = block + v_scales_at<Store>(l, tile % per);
            t.k_scales[i] = block + k_scales_at<Store>(l, tile % per);
        }
        return t;
    }

    static inline Tiles tiles_of(const AttendArgs& a, const ChunkTiles& now, const ChunkTiles& next, int h) {
        const HeadLayout& l = *a.kv.layout;
        const size_t skip = l.tiles_per_block == 0 ? 0 : h * l.head_bytes;
        Tiles t;
        t.first = now.first;
        t.last = now.last;
        t.k_step = l.k_step;
        t.v_step = static_cast<size_t>(l.v_pad / kTile) * Store::kUnitBytes;
        for (int i = 0; i < kTilesPerChunk; ++i) {
            t.k[i] = now.k[i] + skip;
            t.v[i] = now.v[i] + skip;
            t.k_scales[i] = now.k_scales[i] + skip;
            t.v_scales[i] = now.v_scales[i] + skip;
        }
        t.next_k = h + 1 == a.heads ? next.k[0] : t.k[0] + l.head_bytes;
        return t;
    }

    // Of the 64 tokens of a chunk, as floats.
    struct Scales {
        float k[kChunk], v[kChunk];
    };

    // Scores of one row -> weights; what is not visible gets a weight of exactly zero.
    static inline void soften(const AttendArgs& a, const Rows& w, const Scales& scales, int row, int state, int slot,
                              int64_t base, float c) {
        constexpr int N = kTilesPerChunk * kVecs;
        const HeadLayout& l = *a.kv.layout;
        F s[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) s[i] = vload(w.s + slot * kChunk + i * W);
        if constexpr (Store::kScaled) multiply(s, scales.k);
        if (a.softcap > 0.0f)
            for (int i = 0; i < N; ++i) s[i] = vsoftcap(vmul(s[i], vset(a.scale)), a.softcap);
        if (!whole(a, base)) {
            const Span seen = visible(a, row);
            const int lo = seen.lo > base ? static_cast<int>(seen.lo - base < kChunk ? seen.lo - base : kChunk) : 0;
            const int hi = seen.hi < base + kChunk ? static_cast<int>(seen.hi > base ? seen.hi - base : 0) : kChunk;
            for (int i = 0; i < N; ++i) s[i] = keep_lanes(s[i], lo - i * W, hi - i * W);
        }
        F top = s[0];
#pragma GCC unroll 16
        for (int i = 1; i < N; ++i) top = vmax(top, s[i]);
        if (any_greater(top, w.bound[state])) raise(w, state, hmax(top), c, l.v_pad);
        const F scale = vset(c), m = vset(-w.m[state]);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) s[i] = Kernel::exp2(vfma(s[i], scale, m));
        if constexpr (Store::kScaled) {
            add_weights(s, w.sums + state * kTile);
            multiply(s, scales.v);
            Kernel::store(s, w.p + slot * kChunk);
        } else {
            Kernel::emit(s, w.sums + state * kTile, w.p + slot * kChunk);
        }
    }

    // Whether every row sees all of a chunk; the last token sees most and its window begins last.
    static inline bool whole(const AttendArgs& a, int64_t base) {
        const int64_t first_end = a.length - a.new_tokens + 1;
        return base + kChunk <= first_end && (a.window == 0 || base >= a.length - a.window);
    }

    static inline void widen(const uint8_t* const* tiles, float* out) {
        for (int t = 0; t < kTilesPerChunk; ++t)
            for (int j = 0; j < kTile; j += W)
                vstore(out + t * kTile + j, load_bf16(reinterpret_cast<const uint16_t*>(tiles[t]) + j));
    }
    static inline void multiply(F* s, const float* scales) {
#pragma GCC unroll 16
        for (int i = 0; i < kTilesPerChunk * kVecs; ++i) s[i] = vmul(s[i], vload(scales + i * W));
    }

    static __attribute__((noinline)) void raise(const Rows& w, int state, float top, float c, int v_pad) {
        const float m = top * c;
        const float alpha = w.bound[state] == -__builtin_inff() ? 0.0f : exp2_one(w.m[state] - m);
        w.m[state] = m;
        w.bound[state] = (m + kSlack) / c;
        for (int j = 0; j < kTile; j += W) {
            float* x = w.sums + state * kTile + j;
            vstore(x, vmul(vload(x), vset(alpha)));
        }
        for (int d = 0; d < v_pad; d += W) {
            float* x = w.acc + static_cast<size_t>(state) * v_pad + d;
            vstore(x, vmul(vload(x), vset(alpha)));
        }
    }

    // The hardware prefetcher follows straight lines only. So what comes next (V during K, the next head's K during V)
    // is prefetched in the order it lies, a unit for every unit that leaves memory. Rows beyond kPass take another
    // pass over a chunk that the first one has brought in, and the passes share the prefetching.
    template <int MR>
    static inline void scores(const HeadLayout& l, const Tiles& tiles, const typename Kernel::Query* q, float* s) {
        constexpr int N = MR < Kernel::kPass ? MR : Kernel::kPass, kRest = MR - N;
        constexpr int TT =
            pow2_below(Kernel::kRegisters / (N * kVecs)) > 4 ? 4 : pow2_below(Kernel::kRegisters / (N * kVecs));
        constexpr int kShare = kRest > 0 && TT > 1 ? TT / 2 : TT;
        const int units = l.k_pad / Store::kSteps;
        const size_t pass = static_cast<size_t>(units) * kShare * Store::kUnitBytes;
        const uint8_t* ahead = tiles.v[0];
        for (int t = 0; t < kTilesPerChunk; t += TT) {
            Kernel::template score_pass<N, TT, kShare>(tiles, t, q, MR, units, ahead, s + t * kTile);
            ahead += pass;
            if constexpr (kRest > 0) {
                Kernel::template score_pass<kRest, TT, kShare>(tiles, t, q + N * Kernel::kQueryStep, MR, units, ahead,
                                                               s + N * kChunk + t * kTile);
                ahead += pass;
            }
        }
    }

    // All MR rows over NC runs of dims, N rows a pass.
    template <int MR, int N, int NC, int R = 0>
    static inline const uint8_t* value_rows(const HeadLayout& l, const Tiles& tiles, const float* p,
                                            const uint8_t* ahead, float* acc, int c) {
        constexpr int kPasses = (MR + N - 1) / N, kShare = NC > kPasses ? NC / kPasses : 1;
        constexpr int kNow = MR - R < N ? MR - R : N;
        Kernel::template value_pass<kNow, NC, kShare>(tiles, c, p + R * kChunk, ahead, acc + R * l.v_pad, l.v_pad);
        ahead += static_cast<size_t>(kChunk / Store::kSteps) * kShare * Store::kUnitBytes;
        if constexpr (R + N < MR) return value_rows<MR, N, NC, R + N>(l, tiles, p, ahead, acc, c);
        return ahead;
    }

    template <int MR, int N, int NC>
    static inline void values(const HeadLayout& l, const Tiles& tiles, const float* p, const uint8_t* ahead, float* acc,
                              int c) {
        for (; c + NC <= l.v_pad / kTile; c += NC)
            ahead = value_rows<MR, N, NC>(l, tiles, p, ahead, acc + c * kTile, c);
        if constexpr (NC > 1) values<MR, N, NC / 2>(l, tiles, p, ahead, acc, c);
    }

    template <int MR>
    static __attribute__((noinline)) void chunk(const AttendArgs& a, const Rows& w, const Tiles& tiles, int h, int row,
                                                int64_t base, float c) {
        constexpr int N = MR < Kernel::kPass ? MR : Kernel::kPass, kWide = MR < Kernel::kWide ? MR : Kernel::kWide;
        const HeadLayout& l = *a.kv.layout;
        const int state = h * a.rows + row;
        float* acc = w.acc + static_cast<size_t>(state) * l.v_pad;
        const uint8_t* q = w.q + static_cast<size_t>(state) * l.k_pad * Kernel::kQueryBytes;
        scores<MR>(l, tiles, reinterpret_cast<const typename Kernel::Query*>(q), w.s);
        Scales scales;
        if constexpr (Store::kScaled) {
            widen(tiles.k_scales, scales.k);
            widen(tiles.v_scales, scales.v);
        }
        for (int r = 0; r < MR; ++r) soften(a, w, scales, row + r, state + r, r, base, c);
        if (l.v_pad % (8 * kTile) == 0) {  // read whole rows of V where they are long
            values<MR, kWide, pow2_below(Kernel::kRegisters / (kWide * kVecs))>(l, tiles, w.p, tiles.next_k, acc, 0);
        } else {
            values<MR, N, pow2_below(Kernel::kRegisters / (N * kVecs))>(l, tiles, w.p, tiles.next_k, acc, 0);
        }
    }

    template <int N>
    static inline void dispatch(int rows, const AttendArgs& a, const Rows& w, const Tiles& t, int h, int row,
                                int64_t base, float c) {
        if (rows == N) return chunk<N>(a, w, t, h, row, base, c);
        if constexpr (N > 1) dispatch<N - 1>(rows, a, w, t, h, row, base, c);
    }

    template <int N>
    static void prepare(int rows, const AttendArgs& a, int h, int row, uint8_t* q) {
        if (rows == N) return Kernel::template prepare<N>(a, h, row, q);
        if constexpr (N > 1) prepare<N - 1>(rows, a, h, row, q);
    }

    static void piece(const AttendArgs& a, const Rows& w, int64_t begin, int64_t end) {
        const HeadLayout& l = *a.kv.layout;
        const float c = a.softcap > 0.0f ? kLog2E : a.scale * kLog2E;
        const Span all = {visible(a, 0).lo, visible(a, a.rows - 1).hi};
        const size_t states = static_cast<size_t>(a.heads) * a.rows;
        for (size_t r = 0; r < states; ++r) {
            w.m[r] = 0.0f;
            w.bound[r] = -__builtin_inff();
        }
        __builtin_memset(w.sums, 0, states * kTile * sizeof(float));
        __builtin_memset(w.acc, 0, states * l.v_pad * sizeof(float));
        if (all.lo > begin) begin = all.lo / kChunk * kChunk;
        if (all.hi < end) end = all.hi;
        if (begin >= end) return;
        ChunkTiles now = locate(a, w, begin, all), next = now;
        for (int64_t base = begin; base < end; base += kChunk, now = next) {
            if (base + kChunk < all.hi) next = locate(a, w, base + kChunk, all);
            for (int h = 0; h < a.heads; ++h) {
                if (a.fresh.count > 0) write_fresh(a, h, base);
                if (l.tiles_per_block == 0) gather(a, w, h, base);
                const Tiles tiles = tiles_of(a, now, next, h);
                for (int row = 0; row < a.rows; row += kMaxRows) {
                    const int n = a.rows - row < kMaxRows ? a.rows - row : kMaxRows;
                    if (!whole(a, base) && (visible(a, row + n - 1).hi <= base || visible(a, row).lo >= base + kChunk))
                        continue;
                    dispatch<kMaxRows>(n, a, w, tiles, h, row, base, c);
                }
            }
        }
    }

    // New tokens are written when their chunk is about to be read: by then it is on its way into the cache.
    static void write_fresh(const AttendArgs& a, int h, int64_t base) {
        const int64_t end = a.fresh.position + a.fresh.count;
        const int64_t first = base > a.fresh.position ? base : a.fresh.position;
        const int64_t last = base + kChunk < end ? base + kChunk : end;
        if (first >= last) return;
        const HeadLayout& l = *a.kv.layout;
        const int64_t skip = (first - a.fresh.position) * a.fresh.stride, size = a.type == ActType::kF32 ? 4 : 2;
        AppendArgs f = a.fresh;
        f.kv.base += h * l.head_bytes;
        f.k = static_cast<const uint8_t*>(f.k) + (skip + static_cast<int64_t>(h) * l.k_dim) * size;
        f.v = static_cast<const uint8_t*>(f.v) + (skip + static_cast<int64_t>(h) * l.v_dim) * size;
        f.position = first;
        f.count = last - first;
        Append<Store>::run(f);
    }

    static void gather(const AttendArgs& a, const Rows& w, int h, int64_t base) {
        HeadView kv = a.kv;
        kv.base += h * kv.layout->head_bytes;
        Append<Store>::gather(kv, base, a.length < base + kChunk ? a.length : base + kChunk, w.k_tiles, w.v_tiles);
    }

    static inline float sum_of(const Rows& w, size_t state) {
        F x = vload(w.sums + state * kTile);
        for (int j = W; j < kTile; j += W) x = vadd(x, vload(w.sums + state * kTile + j));
        return hsum(x);
    }

    static void run(const AttendArgs& a) {
        const HeadLayout& l = *a.kv.layout;
        const Rows w = carve_rows(a);
        for (int h = 0; h < a.heads; ++h)
            for (int row = 0; row < a.rows; row += kMaxRows)
                prepare<kMaxRows>(a.rows - row < kMaxRows ? a.rows - row : kMaxRows, a, h, row,
                                  w.q + static_cast<size_t>(h * a.rows + row) * l.k_pad * Kernel::kQueryBytes);
        const bool whole = a.partials == nullptr;
        const int states = a.heads * a.rows;
        float* total = whole ? w.total : a.partials;
        if (whole || a.fold) clear_partials(total, states, l.v_pad);
        for (int64_t i = a.piece_begin; i < a.piece_end; ++i) {
            piece(a, w, i * kPiece, (i + 1) * kPiece);
            if (!whole && !a.fold) {
                total = a.partials + (i - a.piece_begin) * a.partial_stride;
                clear_partials(total, states, l.v_pad);
            }
            for (int r = 0; r < states; ++r) {
                const float m = w.bound[r] == -__builtin_inff() ? w.bound[r] : w.m[r];
                fold(partial_at(total, r, l.v_pad), m, sum_of(w, r), w.acc + static_cast<size_t>(r) * l.v_pad, l.v_pad);
            }
        }
        if (!whole) return;
        for (int r = 0; r < states; ++r) {
            const int row = a.first_row + r % a.rows, head = r / a.rows * a.group + row % a.group;
            const int64_t at = row / a.group * a.out_stride + static_cast<int64_t>(head) * l.v_dim;
            write_out(partial_at(total, r, l.v_pad), a.sinks ? a.sinks + head : nullptr, l.v_dim, a.out, a.type, at);
        }
    }
};
