// One piece of a sequence's latents and the query rows that attend over it.
#pragma once
#include "latent_shared.h"
#include "place.h"

namespace hpcdecode {

constexpr float kLatentLog2E = 1.4426950408889634f;

struct LatentItem {
    Block& block;
    const LatentArgs& a;
    const HeadLayout& h;
    LatentShared at;
    Item item;
    SequenceArgs sequence;
    int rows, begin, end;  // query rows; positions, from the first one of a tile
    int low, high;         // all rows see the positions [low, high)

    HPC_DEVICE LatentItem(Block& b, const LatentArgs& args)
        : block(b),
          a(args),
          h(args.layer.head),
          at(LatentShared::of(args.layer.head, args.form)),
          item(args.batch.items[b.x]),
          sequence(args.batch.sequences[item.sequence]) {
        const int left = sequence.count * a.layer.group - item.row_block * a.form.rows;
        rows = left < a.form.rows ? left : a.form.rows;
        const Span first = seen(0), last = seen(rows - 1);
        low = last.low;
        high = first.high;
        begin = item.piece * kLatentPiece;
        end = begin + kLatentPiece;
        if (first.low > begin) begin = first.low / a.form.tile * a.form.tile;
        if (last.high < end) end = last.high;
    }

    template <class T>
    HPC_DEVICE T* shared(int offset) const {
        return reinterpret_cast<T*>(block.smem + offset);
    }

    // The positions that a row sees; none for rows that pad a block.
    HPC_DEVICE Span seen(int row) const {
        return row < rows ? visible(a.layer, sequence, item.row_block * a.form.rows + row) : Span{0, 0};
    }
    HPC_DEVICE bool all_seen(int base) const { return base >= low && base + a.form.tile <= high; }

    // Returns a score of q.k in units of which weights are powers of 2.
    HPC_DEVICE float score(float x) const {
        x *= a.layer.scale;
        if (a.layer.softcap > 0.0f) x = a.layer.softcap * tanhf(x / a.layer.softcap);
        return x * kLatentLog2E;
    }

    // Returns the query token and head of a row.
    HPC_DEVICE int64_t token_of(int row) const {
        return sequence.first_row + (item.row_block * a.form.rows + row) / a.layer.group;
    }
    HPC_DEVICE int head_of(int row) const { return (item.row_block * a.form.rows + row) % a.layer.group; }
};

// What a thread keeps of N rows.
template <int N>
struct PerRow {
    float v[N];
};

// Reduce every float over neighbouring lanes, as larger_of and sum_of do.
template <int Lanes, int N>
HPC_DEVICE void larger_of_rows(Block& block, Own<PerRow<N>>& x) {
    HPC_UNROLL
    for (int i = 0; i < N; ++i) {
        Own<float> one;
        block.each([&](int t) { one[t] = x[t].v[i]; });
        larger_of<Lanes>(block, one);
        block.each([&](int t) { x[t].v[i] = one[t]; });
    }
}
template <int Lanes, int N>
HPC_DEVICE void sum_of_rows(Block& block, Own<PerRow<N>>& x) {
    HPC_UNROLL
    for (int i = 0; i < N; ++i) {
        Own<float> one;
        block.each([&](int t) { one[t] = x[t].v[i]; });
        sum_of<Lanes>(block, one);
        block.each([&](int t) { x[t].v[i] = one[t]; });
    }
}

}  // namespace hpcdecode
