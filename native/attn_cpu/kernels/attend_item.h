// The driver of one work item: attention over pieces of some KV heads for their query rows.
#pragma once
#include "append.h"
#include "gather.h"
#include "partial.h"
#include "softmax.h"
#include "values_in_keys.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

inline uint8_t* carve(uint8_t*& p, size_t bytes) {
    uint8_t* at = p;
    p += (bytes + 63) / 64 * 64;
    return at;
}

template <class Kernel>
struct AttendItem {
    using Store = typename Kernel::Storage;
    static constexpr int kRows = Kernel::kRows;
    static constexpr int kMostRows = Kernel::kTallRows > kRows ? Kernel::kTallRows : kRows;
    static_assert(kMostRows <= kMaxPassRows, "scratch_bytes has room for fewer");

    // The state of row r of head h has the index h * rows + r.
    struct Scratch {
        Softmax x;
        uint8_t* q;      // of every kRows rows
        float* total;    // partials, folded so far
        float* s;        // [kMostRows][64] scores
        float* others;   // [kMostRows][64] scores of K's other dims; null for a type without scales
        float* p;        // [kMostRows][64] weights as the kernel wants them
        float* rotated;  // [kRows][k_dim] queries
        uint8_t* run;    // gathered rows
        uint8_t* made;   // V units of a latent layer
        typename Kernel::Unit* unit;
    };

    static Scratch carve_scratch(const AttendArgs& a, typename Kernel::Unit& unit) {
        const HeadLayout& l = *a.kv.layout;
        uint8_t* at = a.scratch;
        const size_t rows = static_cast<size_t>(a.heads) * a.rows, f = sizeof(float);
        const auto floats = [&](size_t n) { return reinterpret_cast<float*>(carve(at, n * f)); };
        Scratch w;
        w.s = floats(kMostRows * kChunk);
        w.others = Store::kScaled ? floats(kMostRows * kChunk) : nullptr;
        w.p = floats(kMostRows * kChunk);
        w.q = carve(at, rows * l.k_pad * f);
        w.x.m = floats(rows);
        w.x.bound = floats(rows);
        w.x.sums = floats(rows * kTile);
        w.x.acc = floats(rows * l.v_pad);
        w.x.queries = floats(rows);
        w.x.middles = Store::V::kMiddle ? floats(rows * kTile) : nullptr;
        w.rotated = floats(static_cast<size_t>(kRows) * l.k_dim);
        w.x.v_pad = l.v_pad;
        w.x.mixes = floats(rows * a.bias.dim);
        w.x.c = a.softcap > 0.0f || a.bias.dim > 0 ? kLog2E : a.scale * kLog2E;
        w.total = floats(rows * (2 + l.v_pad));
        w.run = carve(at, l.run_bytes);
        w.made = carve(at, l.made_bytes);
        w.unit = &unit;
        return w;
    }

    // Returns the rows of a pass: as few passes as possible, and about equally many rows in each.
    static int pass_rows(int rows) {
        const int passes = (rows + kRows - 1) / kRows;
        return (rows + passes - 1) / passes;
    }

    // Returns how many tiles of K, or columns of V, a pass of MR rows holds in registers.
    template <int MR>
    static constexpr int wide() {
        return MR * Kernel::kSums * 2 <= kAccs ? 2 : 1;
    }

    template <int MR>
    static __attribute__((noinline)) void chunk(const AttendArgs& a, const Scratch& w, const Tiles& tiles, Ahead& ahead,
                                                int h, int row, int64_t base) {
        constexpr int N = wide<MR>();
        w.unit->template shape<MR>();
        const HeadLayout& l = *a.kv.layout;
        const int state = h * a.rows + row;
        const uint8_t* q = w.q + static_cast<size_t>(state) * l.k_pad * Kernel::kQueryBytes;
        const int first_pad = l.k_split > 0 ? l.k_split : l.k_pad;
        for (int t = 0; t < kTilesPerChunk; t += N)
            Kernel::template score_pass<MR, N>(tiles, t, q, first_pad, ahead, w.s + t * kTile);
        const auto weights = [&](const Scales<Store>* scales) {
            soften<Kernel>(a, w.x, scales, row, MR, state, base, w.s, w.p, ahead);
        };
        if constexpr (Store::kScaled) {
            Scales<Store> scales(tiles);
            if (l.k_split > 0) {
                const Tiles rest = rest_of<Store>(l, tiles);
                const uint8_t* other = q + static_cast<size_t>(MR) * l.k_split * Kernel::kQueryBytes;
                for (int t = 0; t < kTilesPerChunk; t += N)
                    Kernel::template score_pass<MR, N>(rest, t, other, l.k_pad - l.k_split, ahead,
                                                       w.others + t * kTile);
                scales.join(tiles, MR, w.s, w.others);
            }
            ahead.template advance<true, Scales<Store>::kBytes>();
            weights(&scales);
        } else {
            weights(nullptr);
        }
        float* acc = w.x.acc + static_cast<size_t>(state) * l.v_pad;
        int c = 0;
        for (; c + N <= l.v_pad / kTile; c += N) Kernel::template value_pass<MR, N>(tiles, c, w.p, ahead, acc, l.v_pad);
        if (c < l.v_pad / kTile) Kernel::template value_pass<MR, 1>(tiles, c, w.p, ahead, acc, l.v_pad);
    }

    template <int N>
    static inline void dispatch(int rows, const AttendArgs& a, const Scratch& w, const Tiles& t, Ahead& ahead, int h,
                                int row, int64_t base) {
        if (rows == N) return chunk<N>(a, w, t, ahead, h, row, base);
        if constexpr (N > 1) dispatch<N - 1>(rows, a, w, t, ahead, h, row, base);
    }

    template <int N>
    static void prepare(int rows, const AttendArgs& a, int h, int row, uint8_t* q) {
        if (rows == N) return Kernel::template prepare<N>(a, h, row, q);
        if constexpr (N > 1) prepare<N - 1>(rows, a, h, row, q);
    }

    // Rotates queries as K is, and prepares them instead of those in `a`.
    static void prepare_rotated(int rows, const AttendArgs& a, const Scratch& w, int h, int row, uint8_t* q) {
        const HeadLayout& l = *a.kv.layout;
        for (int r = 0; r < rows; ++r) {
            float *x = w.rotated + static_cast<size_t>(r) * l.k_dim, sum = 0.0f;
            const int64_t at = query_at(a, h, row + r);
            for (int d = 0; d < l.k_dim; ++d) x[d] = load_act(a.q, a.type, at + d);
            turn(x, whole_or_first(l));
            if (l.k_split > 0) turn(x, rest(l));
            for (int d = 0; Store::K::kMiddle && d < l.k_dim; ++d) sum += x[d];
            w.x.queries[h * a.rows + row + r] = sum;
        }
        if (l.k_split == 0) return prepare_dims(rows, a, w, l, 0, q);
        HeadLayout part = l;
        part.k_dim = part.k_pad = l.k_split;
        prepare_dims(rows, a, w, part, 0, q);
        part.k_dim = l.k_dim - l.k_split;
        part.k_pad = l.k_pad - l.k_split;
        prepare_dims(rows, a, w, part, l.k_split, q + static_cast<size_t>(rows) * l.k_split * Kernel::kQueryBytes);
    }

    static void turn(float* x, const Dims& dims) {
        const float part = 1.0f / static_cast<float>(dims.rotation);
        for (int d = dims.first; d < dims.last; ++d) x[d] *= part;
        rotate(x + dims.first, dims.last - dims.first, dims.rotation);
    }

    // Prepares the rotated queries' dims from `first` on, which `part` describes.
    static void prepare_dims(int rows, const AttendArgs& a, const Scratch& w, const HeadLayout& part, int first,
                             uint8_t* q) {
        AttendArgs rotated = a;
        rotated.kv.layout = &part;
        rotated.q = w.rotated + first;
        rotated.type = ActType::kF32;
        rotated.q_stride = a.kv.layout->k_dim;
        rotated.first_row = 0;
        rotated.group = 1;
        prepare<kRows>(rows, rotated, 0, 0, q);
    }

    static void piece(const AttendArgs& a, const Scratch& w, int64_t begin, int64_t end) {
        const HeadLayout& l = *a.kv.layout;
        const Span all = {visible(a, 0).lo, visible(a, a.rows - 1).hi};
        w.x.clear(static_cast<size_t>(a.heads) * a.rows);
        if (all.lo > begin) begin = all.lo / kChunk * kChunk;
        if (all.hi < end) end = all.hi;
        if (begin >= end) return;
        ChunkRuns now = find_runs(a.kv, w.run, a.chosen, begin, all), next = now;
        for (int64_t base = begin; base < end; base += kChunk, now = next) {
            if (base + kChunk < all.hi) next = find_runs(a.kv, w.run, a.chosen, base + kChunk, all);
            for (int h = 0; h < a.heads; ++h) {
                if (a.fresh.count > 0) write_fresh(a, h, base);
                if (l.by_rows) gather(a, w, h, base);
                const size_t skip = l.by_rows ? 0 : h * l.head_bytes;
                const bool more = h + 1 < a.heads;
                const uint8_t* then[kTilesPerChunk];
                for (int i = 0; i < now.count; ++i) then[i] = more ? now.run[i] + skip + l.head_bytes : next.run[i];
                Tiles tiles = tiles_of<Store>(l, now, skip);
                if (l.latent) lay_values(Store(), l, w.made, tiles);
                head_chunk(a, w, tiles, Ahead(now.run[0] + skip, l.run_bytes, then, now.count), h, base);
            }
        }
    }

    static void head_chunk(const AttendArgs& a, const Scratch& w, const Tiles& tiles, Ahead ahead, int h,
                           int64_t base) {
        const auto sees = [&](int row, int n) {
            return whole(a, base) || (visible(a, row + n - 1).hi > base && visible(a, row).lo < base + kChunk);
        };
        if constexpr (Kernel::kTallRows > 0) {
            if (Kernel::tall(*a.kv.layout, a.group)) {
                for (int row = 0; row < a.rows; row += Kernel::kTallRows)
                    if (sees(row, Kernel::kTallRows)) chunk<Kernel::kTallRows>(a, w, tiles, ahead, h, row, base);
                return;
            }
        }
        const int most = pass_rows(a.rows);
        for (int row = 0; row < a.rows; row += most) {
            const int n = a.rows - row < most ? a.rows - row : most;
            if (!sees(row, n)) continue;
            dispatch<kRows>(n, a, w, tiles, ahead, h, row, base);
        }
    }

    // Writes new tokens just before their chunk is read, when it is on its way into the cache.
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

    static void gather(const AttendArgs& a, const Scratch& w, int h, int64_t base) {
        HeadView kv = a.kv;
        kv.base += h * kv.layout->head_bytes;
        gather_run<Store>(kv, base, a.length < base + kChunk ? a.length : base + kChunk, a.length, a.chosen, w.run);
    }

    static void run(const AttendArgs& a) {
        const HeadLayout& l = *a.kv.layout;
        if constexpr (Kernel::kTiles) {
            if (!Kernel::fits(l, a.group)) return AttendItem<typename Kernel::Vectors>::run(a);
        }
        typename Kernel::Unit unit;
        const Scratch w = carve_scratch(a, unit);
        if (a.bias.dim > 0) load_mixes(a.bias, a.type, a.q_stride, a.group, a.heads, a.first_row, a.rows, w.x.mixes);
        const int most = pass_rows(a.rows);
        for (int h = 0; h < a.heads; ++h)
            for (int row = 0; row < a.rows; row += most) {
                const int n = a.rows - row < most ? a.rows - row : most;
                uint8_t* q = w.q + static_cast<size_t>(h * a.rows + row) * l.k_pad * Kernel::kQueryBytes;
                if constexpr (Store::kScaled) {
                    prepare_rotated(n, a, w, h, row, q);
                } else {
                    prepare<kRows>(n, a, h, row, q);
                }
            }
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
                w.x.add_middles(r);
                const float m = w.x.bound[r] == -__builtin_inff() ? w.x.bound[r] : w.x.m[r];
                fold(partial_at(total, r, l.v_pad), m, w.x.sum(r), w.x.acc + static_cast<size_t>(r) * l.v_pad, l.v_pad);
            }
        }
        if (whole) write_rows(a, total);
    }

    static void write_rows(const AttendArgs& a, float* total) {
        const HeadLayout& l = *a.kv.layout;
        for (int r = 0; r < a.heads * a.rows; ++r) {
            const int row = a.first_row + r % a.rows, head = r / a.rows * a.group + row % a.group;
            const int64_t at = row / a.group * a.out_stride + static_cast<int64_t>(head) * l.v_dim;
            write_out(partial_at(total, r, l.v_pad), sink_of(a.sinks, row / a.group, head), l.v_dim, l.v_rotation,
                      a.out, a.type, at);
        }
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
