// The driver of one work item: pieces of one KV head against its query rows. Included inside the namespace of one ISA.
//
// Weights are 2^(score * scale * log2 e - m) for a reference exponent m that is raised only when a score
// exceeds it by more than kSlack: no overflow is possible, and most chunks need neither a horizontal maximum nor a
// rescaled accumulator. A partial is (m, sum of weights, weighted values); m = -inf marks an empty one.
constexpr float kSlack = 8.0f;

inline uint8_t* carve(uint8_t*& p, size_t bytes) {
    uint8_t* at = p;
    p += (bytes + 63) / 64 * 64;
    return at;
}

struct Partial {
    float* m;
    float* sum;
    float* acc;  // [v_pad]
};
inline Partial partial_at(float* base, int row, int v_pad) {
    float* p = base + static_cast<size_t>(row) * (2 + v_pad);
    return {p, p + 1, p + 2};
}

inline void clear_partials(float* base, int rows, int v_pad) {
    for (int r = 0; r < rows; ++r) {
        const Partial p = partial_at(base, r, v_pad);
        *p.m = -__builtin_inff();
        *p.sum = 0.0f;
        for (int d = 0; d < v_pad; d += W) vstore(p.acc + d, vzero());
    }
}

// into := into merged with the later partial x.
inline void fold(const Partial& into, float m, float sum, const float* acc, int v_pad) {
    const float inf = __builtin_inff();
    if (m == -inf) return;
    const float top = *into.m > m ? *into.m : m;
    const float a = *into.m == -inf ? 0.0f : exp2_one(*into.m - top), b = exp2_one(m - top);
    *into.m = top;
    *into.sum = *into.sum * a + sum * b;
    const F va = vset(a), vb = vset(b);
    for (int d = 0; d < v_pad; d += W)
        vstore(into.acc + d, vfma(vload(into.acc + d), va, vmul(vload(acc + d), vb)));
}

inline void write_out(const Partial& p, const float* sink, int v_dim, int v_pad, void* out, ActType type, int64_t at) {
    const float inf = __builtin_inff();
    float total = *p.sum, weight = 1.0f;
    if (sink != nullptr) {
        const float s = *sink * kLog2E, top = *p.m > s ? *p.m : s;
        weight = *p.m == -inf ? 0.0f : exp2_one(*p.m - top);
        total = total * weight + (s == -inf ? 0.0f : exp2_one(s - top));
    }
    const float inverse = total > 0.0f || total != total ? weight / total : 0.0f;
    for (int d = 0; d < v_pad; d += W) vstore(p.acc + d, vmul(vload(p.acc + d), vset(inverse)));
    for (int d = 0; d < v_dim; ++d) store_act(out, type, at + d, p.acc[d]);
}

template <class Kernel>
struct AttendItem {
    using Store = typename Kernel::Storage;

    struct Rows {
        uint8_t* q;    // row tiles of kMaxRows
        float* m;      // [rows] reference exponent
        float* bound;  // [rows] score above which m is raised; -inf while empty
        float* sums;   // [rows][16]
        float* acc;    // [rows][v_pad]
        float* total;  // [rows] partials, folded so far
        float* s;      // [kMaxRows][64] scores
        float* p;      // [kMaxRows][64] weights as the kernel wants them
        uint8_t* k_tiles;
        uint8_t* v_tiles;
    };

    static Rows carve_rows(const AttendArgs& a) {
        const HeadLayout& l = *a.kv.layout;
        uint8_t* at = a.scratch;
        const size_t rows = a.rows, f = sizeof(float);
        Rows w;
        w.q = carve(at, rows * l.k_pad * f);
        w.m = reinterpret_cast<float*>(carve(at, rows * f));
        w.bound = reinterpret_cast<float*>(carve(at, rows * f));
        w.sums = reinterpret_cast<float*>(carve(at, rows * kTile * f));
        w.acc = reinterpret_cast<float*>(carve(at, rows * l.v_pad * f));
        w.total = reinterpret_cast<float*>(carve(at, rows * (2 + l.v_pad) * f));
        w.s = reinterpret_cast<float*>(carve(at, kMaxRows * kChunk * f));
        w.p = reinterpret_cast<float*>(carve(at, kMaxRows * kChunk * f));
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

    static inline void place(const AttendArgs& a, const Rows& w, int64_t tile, const uint8_t*& k, const uint8_t*& v) {
        const HeadLayout& l = *a.kv.layout;
        if (l.tiles_per_block == 0) {
            k = w.k_tiles + tile % kTilesPerChunk * l.k_tile;
            v = w.v_tiles + tile % kTilesPerChunk * l.v_tile;
            return;
        }
        const uint32_t at = static_cast<uint32_t>(tile), per = static_cast<uint32_t>(l.tiles_per_block);
        const uint8_t* block = a.kv.base + a.kv.blocks[at / per] * a.kv.block_bytes;
        k = block + at % per * l.k_tile;
        v = block + l.v_offset + at % per * l.v_tile;
    }

    static void locate(const AttendArgs& a, const Rows& w, int64_t base, Span seen, Tiles& t) {
        const int64_t end = seen.hi < base + kChunk ? seen.hi : base + kChunk;
        const int64_t final_tile = (seen.hi - 1) / kTile;
        t.first = seen.lo > base ? static_cast<int>((seen.lo - base) / kTile) : 0;
        t.last = static_cast<int>((end - base + kTile - 1) / kTile);
        if (a.kv.layout->tiles_per_block == 0) {
            const int64_t stop = a.length < base + kChunk ? a.length : base + kChunk;
            Append<Store>::gather(a.kv, base, stop, w.k_tiles, w.v_tiles);
        }
        for (int i = 0; i < kTilesPerChunk; ++i) {
            const int use = i < t.first ? t.first : i >= t.last ? t.last - 1 : i;
            const int64_t tile = base / kTile + i, next = tile + kTilesPerChunk;
            place(a, w, base / kTile + use, t.k[i], t.v[i]);
            place(a, w, next < final_tile ? next : final_tile, t.next_k[i], t.next_v[i]);
        }
    }

    // Scores of one row -> weights; returns nothing visible by weights of exactly zero.
    static inline void soften(const AttendArgs& a, const Rows& w, int row, int slot, int64_t base, float c) {
        constexpr int N = kTilesPerChunk * kVecs;
        const HeadLayout& l = *a.kv.layout;
        const Span seen = visible(a, row);
        F s[N];
        for (int i = 0; i < N; ++i) s[i] = vload(w.s + slot * kChunk + i * W);
        if (a.softcap > 0.0f)
            for (int i = 0; i < N; ++i) s[i] = vsoftcap(vmul(s[i], vset(a.scale)), a.softcap);
        if (seen.lo > base || seen.hi < base + kChunk) {
            const int lo = seen.lo > base ? static_cast<int>(seen.lo - base < kChunk ? seen.lo - base : kChunk) : 0;
            const int hi = seen.hi < base + kChunk ? static_cast<int>(seen.hi > base ? seen.hi - base : 0) : kChunk;
            for (int i = 0; i < N; ++i) s[i] = keep_lanes(s[i], lo - i * W, hi - i * W);
        }
        F top = s[0];
        for (int i = 1; i < N; ++i) top = vmax(top, s[i]);
        if (any_greater(top, w.bound[row])) raise(w, row, hmax(top), c, l.v_pad);
        const F scale = vset(c), m = vset(-w.m[row]);
        for (int i = 0; i < N; ++i) s[i] = Kernel::exp2(vfma(s[i], scale, m));
        Kernel::emit(s, w.sums + row * kTile, w.p + slot * kChunk);
    }

    static __attribute__((noinline)) void raise(const Rows& w, int row, float top, float c, int v_pad) {
        const float m = top * c;
        const float alpha = w.bound[row] == -__builtin_inff() ? 0.0f : exp2_one(w.m[row] - m);
        w.m[row] = m;
        w.bound[row] = (m + kSlack) / c;
        for (int j = 0; j < kTile; j += W) {
            float* x = w.sums + row * kTile + j;
            vstore(x, vmul(vload(x), vset(alpha)));
        }
        for (int d = 0; d < v_pad; d += W) {
            float* x = w.acc + static_cast<size_t>(row) * v_pad + d;
            vstore(x, vmul(vload(x), vset(alpha)));
        }
    }

    template <int MR>
    static void scores(const HeadLayout& l, const Tiles& tiles, const uint8_t* q, float* s) {
        constexpr int TT = kAccs / (MR * kVecs) >= 4 ? 4 : pow2_below(kAccs / (MR * kVecs));
        for (int t = 0; t < kTilesPerChunk; t += TT)
            Kernel::template score_pass<MR, TT>(tiles.k + t, tiles.next_k + t, reinterpret_cast<const typename Kernel::Query*>(q),
                                                l.k_pad / 2, s + t * kTile);
    }

    template <int MR, int NC>
    static inline int value_passes(const HeadLayout& l, const Tiles& tiles, const float* p, float* acc, int c) {
        const int chunks = l.v_pad / kTile;
        for (; c + NC <= chunks; c += NC)
            Kernel::template value_pass<MR, NC>(tiles, c * Kernel::kValueChunk, p, acc + c * kTile, l.v_pad);
        if constexpr (NC > 1) {
            return value_passes<MR, NC / 2>(l, tiles, p, acc, c);
        } else {
            return c;
        }
    }

    template <int MR>
    static void chunk(const AttendArgs& a, const Rows& w, const Tiles& tiles, int row, int64_t base, float c) {
        const HeadLayout& l = *a.kv.layout;
        scores<MR>(l, tiles, w.q + static_cast<size_t>(row) * l.k_pad * Kernel::kQueryBytes, w.s);
        for (int r = 0; r < MR; ++r) soften(a, w, row + r, r, base, c);
        value_passes<MR, pow2_below(kAccs / (MR * kVecs))>(l, tiles, w.p, w.acc + static_cast<size_t>(row) * l.v_pad, 0);
    }

    template <int N>
    static void dispatch(int rows, const AttendArgs& a, const Rows& w, const Tiles& t, int row, int64_t base, float c) {
        if (rows == N) return chunk<N>(a, w, t, row, base, c);
        if constexpr (N > 1) dispatch<N - 1>(rows, a, w, t, row, base, c);
    }

    template <int N>
    static void prepare(int rows, const AttendArgs& a, int row, uint8_t* q) {
        if (rows == N) return Kernel::template prepare<N>(a, row, q);
        if constexpr (N > 1) prepare<N - 1>(rows, a, row, q);
    }

    static void piece(const AttendArgs& a, const Rows& w, int64_t begin, int64_t end) {
        const HeadLayout& l = *a.kv.layout;
        const float c = a.softcap > 0.0f ? kLog2E : a.scale * kLog2E;
        const Span first = visible(a, 0), last = visible(a, a.rows - 1);
        for (int r = 0; r < a.rows; ++r) {
            w.m[r] = 0.0f;
            w.bound[r] = -__builtin_inff();
        }
        __builtin_memset(w.sums, 0, static_cast<size_t>(a.rows) * kTile * sizeof(float));
        __builtin_memset(w.acc, 0, static_cast<size_t>(a.rows) * l.v_pad * sizeof(float));
        if (first.lo > begin) begin = first.lo / kChunk * kChunk;
        if (last.hi < end) end = last.hi;
        Tiles tiles;
        for (int64_t base = begin; base < end; base += kChunk) {
            locate(a, w, base, {first.lo, last.hi}, tiles);
            for (int row = 0; row < a.rows; row += kMaxRows) {
                const int n = a.rows - row < kMaxRows ? a.rows - row : kMaxRows;
                if (visible(a, row + n - 1).hi <= base || visible(a, row).lo >= base + kChunk) continue;
                dispatch<kMaxRows>(n, a, w, tiles, row, base, c);
            }
        }
    }

    static inline float sum_of(const Rows& w, int row) {
        F x = vload(w.sums + row * kTile);
        for (int j = W; j < kTile; j += W) x = vadd(x, vload(w.sums + row * kTile + j));
        return hsum(x);
    }

    static void run(const AttendArgs& a) {
        const HeadLayout& l = *a.kv.layout;
        const Rows w = carve_rows(a);
        for (int row = 0; row < a.rows; row += kMaxRows)
            prepare<kMaxRows>(a.rows - row < kMaxRows ? a.rows - row : kMaxRows, a, row,
                              w.q + static_cast<size_t>(row) * l.k_pad * Kernel::kQueryBytes);
        const bool whole = a.partials == nullptr;
        const size_t partial = static_cast<size_t>(a.rows) * (2 + l.v_pad);
        float* total = whole ? w.total : a.partials;
        if (whole || a.fold) clear_partials(total, a.rows, l.v_pad);
        for (int64_t i = a.piece_begin; i < a.piece_end; ++i) {
            piece(a, w, i * kPiece, (i + 1) * kPiece);
            if (!whole && !a.fold) {
                total = a.partials + (i - a.piece_begin) * partial;
                clear_partials(total, a.rows, l.v_pad);
            }
            for (int r = 0; r < a.rows; ++r) {
                const float m = w.bound[r] == -__builtin_inff() ? w.bound[r] : w.m[r];
                fold(partial_at(total, r, l.v_pad), m, sum_of(w, r), w.acc + static_cast<size_t>(r) * l.v_pad, l.v_pad);
            }
        }
        if (!whole) return;
        for (int r = 0; r < a.rows; ++r) {
            const int row = a.first_row + r, g = row % a.group;
            const int64_t at = row / a.group * a.out_stride + static_cast<int64_t>(g) * l.v_dim;
            write_out(partial_at(total, r, l.v_pad), a.sinks ? a.sinks + g : nullptr, l.v_dim, l.v_pad, a.out, a.type, at);
        }
    }
};

inline void merge_partials(const MergeArgs& a) {
    const size_t stride = static_cast<size_t>(a.rows) * (2 + a.v_pad);
    float* total = reinterpret_cast<float*>(a.scratch);
    for (int r = 0; r < a.rows; ++r) {
        clear_partials(total, 1, a.v_pad);
        const Partial into = partial_at(total, 0, a.v_pad);
        for (int i = 0; i < a.count; ++i) {
            const Partial p = partial_at(const_cast<float*>(a.partials) + i * stride, r, a.v_pad);
            fold(into, *p.m, *p.sum, p.acc, a.v_pad);
        }
        const int row = a.first_row + r, g = row % a.group;
        const int64_t at = row / a.group * a.out_stride + static_cast<int64_t>(g) * a.v_dim;
        write_out(into, a.sinks ? a.sinks + g : nullptr, a.v_dim, a.v_pad, a.out, a.type, at);
    }
}
