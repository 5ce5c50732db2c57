// The scores by which an indexer chooses tokens: those of attention's kernels, of each head, or cut off at zero and
// added up over heads.
#pragma once
#include "attend_item.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Kernel>
struct ScoreItem {
    using Store = typename Kernel::Storage;
    using Attend = AttendItem<Kernel>;

    struct Scratch {
        uint8_t* q;      // of every pass
        float* s;        // [kMostRows][64] scores
        float* weights;  // [heads]
        uint8_t* run;    // gathered rows
        typename Kernel::Unit* unit;
    };

    static Scratch carve_scratch(const IndexArgs& a, typename Kernel::Unit& unit) {
        const HeadLayout& l = *a.keys.layout;
        uint8_t* at = a.scratch;
        Scratch w;
        w.q = carve(at, static_cast<size_t>(a.heads) * l.k_pad * sizeof(float));
        w.s = reinterpret_cast<float*>(carve(at, Attend::kMostRows * kChunk * sizeof(float)));
        w.weights = reinterpret_cast<float*>(carve(at, a.heads * sizeof(float)));
        w.run = carve(at, l.run_bytes);
        w.unit = &unit;
        return w;
    }

    template <int MR>
    static __attribute__((noinline)) void pass(const IndexArgs& a, const Scratch& w, const Tiles& tiles, Ahead& ahead,
                                               int row, int64_t base, F* total) {
        constexpr int N = Attend::template wide<MR>();
        const HeadLayout& l = *a.keys.layout;
        w.unit->template shape<MR>();
        const uint8_t* q = w.q + static_cast<size_t>(row) * l.k_pad * Kernel::kQueryBytes;
        for (int t = 0; t < kTilesPerChunk; t += N)
            Kernel::template score_pass<MR, N>(tiles, t, q, l.k_pad, ahead, w.s + t * kTile);
        for (int r = 0; r < MR; ++r) {
            const float* s = w.s + r * kChunk;
            if (a.weights == nullptr) {
                float* own = a.scores + (row + r) * a.scores_of_head + (base - a.begin);
                for (int i = 0; i < kChunkVecs; ++i) vstore(own + i * W, vload(s + i * W));
                continue;
            }
            const F weight = vset(w.weights[row + r]);
            for (int i = 0; i < kChunkVecs; ++i) total[i] = vfma(vmax(vload(s + i * W), vzero()), weight, total[i]);
        }
    }

    template <int N>
    static inline void dispatch(int rows, const IndexArgs& a, const Scratch& w, const Tiles& t, Ahead& ahead, int row,
                                int64_t base, F* total) {
        if (rows == N) return pass<N>(a, w, t, ahead, row, base, total);
        if constexpr (N > 1) dispatch<N - 1>(rows, a, w, t, ahead, row, base, total);
    }

    static void all_heads(const IndexArgs& a, const Scratch& w, const Tiles& tiles, Ahead ahead, int64_t base,
                          F* total) {
        const HeadLayout& l = *a.keys.layout;
        if constexpr (Kernel::kTallRows > 0) {
            if (Kernel::tall(l, a.heads)) {
                for (int row = 0; row < a.heads; row += Kernel::kTallRows)
                    pass<Kernel::kTallRows>(a, w, tiles, ahead, row, base, total);
                return;
            }
        }
        const int most = Attend::pass_rows(a.heads);
        for (int row = 0; row < a.heads; row += most)
            dispatch<Kernel::kRows>(a.heads - row < most ? a.heads - row : most, a, w, tiles, ahead, row, base, total);
    }

    static void prepare(const IndexArgs& a, const Scratch& w) {
        const HeadLayout& l = *a.keys.layout;
        AttendArgs queries{};
        queries.kv = a.keys;
        queries.q = a.q;
        queries.type = a.type;
        queries.group = a.heads;
        const int most = Attend::pass_rows(a.heads);
        for (int row = 0; row < a.heads; row += most)
            Attend::template prepare<Kernel::kRows>(a.heads - row < most ? a.heads - row : most, queries, 0, row,
                                                    w.q + static_cast<size_t>(row) * l.k_pad * Kernel::kQueryBytes);
        for (int head = 0; a.weights != nullptr && head < a.heads; ++head)
            w.weights[head] = load_act(a.weights, a.type, head);
    }

    static void run(const IndexArgs& a) {
        const HeadLayout& l = *a.keys.layout;
        if constexpr (Kernel::kTiles) {
            if (!Kernel::fits(l, a.heads)) return ScoreItem<typename Kernel::Vectors>::run(a);
        }
        typename Kernel::Unit unit;
        const Scratch w = carve_scratch(a, unit);
        prepare(a, w);
        const Span all = {a.begin, a.end};
        ChunkRuns now = find_runs(a.keys, w.run, nullptr, a.begin, all), next = now;
        for (int64_t base = a.begin; base < a.end; base += kChunk, now = next) {
            const int64_t end = base + kChunk < a.end ? base + kChunk : a.end;
            if (base + kChunk < a.end) next = find_runs(a.keys, w.run, nullptr, base + kChunk, all);
            if (l.by_rows) gather_run<Store>(a.keys, base, end, a.end, nullptr, w.run);
            F total[kChunkVecs];
            for (F& x : total) x = vzero();
            all_heads(a, w, tiles_of<Store>(l, now, 0), Ahead(now.run[0], l.run_bytes, next.run, next.count), base,
                      total);
            for (int i = 0; a.weights != nullptr && i < kChunkVecs; ++i)
                vstore(a.scores + (base - a.begin) + i * W, total[i]);
        }
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
