// Attention of some query rows over one piece of a sequence's latents, to their outputs or to a partial result.
//
// A tile of tokens comes to shared memory once: its rows are the keys, their first columns the values, for all rows.
// While a tile is scored and summed, the next one is on its way. Sums are float32.
#pragma once
#include "latent_by_float.h"
#include "latent_by_tensor.h"

namespace hpcdecode {

template <int N>
struct LatentRows {
    const uint8_t* v[N];
};

// Math: LatentByTensor or LatentByFloat.
template <class Math>
struct Latent {
    static constexpr int kLanes = 8, kEach = Math::kTile * kLanes / kLatentThreads;  // lanes and rows of a load

    static constexpr float kPartial = -1.0f, kUnseen = -2.0f;

    LatentItem x;
    Math math;
    Own<LatentRows<kEach>> next;  // rows t / kLanes + 32 i of the next tile to load, null beyond the last token

    HPC_DEVICE Latent(Block& block, const LatentArgs& args) : x(block, args) {}

    HPC_DEVICE void run() {
        if (x.begin >= x.end) return;
        const int stages = x.a.form.stages;
        load_queries();
        for (int i = 0; i < stages; ++i) {
            look_up(x.begin + i * Math::kTile);
            load(i, x.begin + i * Math::kTile);
        }
        int stage = 0;
        for (int base = x.begin; base < x.end; base += Math::kTile) {
            const int tile = x.at.tiles + stage * x.at.tile_bytes;
            x.block.each([&](int) { stages == 1 ? x.block.template wait<0>() : x.block.template wait<1>(); });
            x.block.sync();
            look_up(base + stages * Math::kTile);
            math.score(x, tile);
            math.weigh(x, base);
            x.block.sync();
            math.add(x, tile);
            x.block.sync();
            load(stage, base + stages * Math::kTile);
            stage = stage + 1 < stages ? stage + 1 : 0;
        }
        math.leave(x);
        x.block.sync();
        finish();
        x.block.sync();
        write();
    }

    HPC_DEVICE void load_queries() {
        x.block.each([&](int t) {
            math.clear(t);
            for (int row = t / kWarp; row < x.a.form.rows; row += kLatentThreads / kWarp) {
                const int64_t from =
                    row < x.rows ? x.token_of(row) * x.a.q.stride + int64_t{x.head_of(row)} * x.h.k_dim : 0;
                HPC_UNROLL4
                for (int d = t % kWarp; d < x.h.k_pad; d += kWarp) {
                    const bool there = row < x.rows && d < x.h.k_dim;
                    Math::put_query(x, row, d, there ? load_act(x.a.q.data, x.a.q.type, from + d) : 0.0f);
                }
            }
        });
    }

    // Begins to read the block ids of the tile at `base`.
    HPC_DEVICE void look_up(int base) {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < kEach; ++i) {
                const int position = base + t / kLanes + i * (kLatentThreads / kLanes);
                next[t].v[i] =
                    position < x.end ? k_row(x.h, place_of(x.a.batch, x.a.layer, x.sequence, 0, position)) : nullptr;
            }
        });
    }

    // Starts one group of copies: the rows of the tile at `base`, which were looked up; zeros where there are none.
    HPC_DEVICE void load(int stage, int base) {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < kEach && base < x.end; ++i) {
                const int token = t / kLanes + i * (kLatentThreads / kLanes);
                const uint8_t* row = next[t].v[i];
                uint8_t* to = x.template shared<uint8_t>(x.at.tiles + stage * x.at.tile_bytes);
                for (int chunk = t % kLanes; chunk * 16 < x.h.k_row; chunk += kLanes)
                    x.block.copy16(to + chunk_at(token, x.at.stride, chunk), row ? row + chunk * 16 : x.a.layer.base,
                                   row != nullptr);
            }
            x.block.commit();
        });
    }

    HPC_DEVICE float* partial(int row) const {
        return x.a.partials + (static_cast<int64_t>(x.block.x) * x.a.form.rows + row) * (2 + x.h.v_pad);
    }

    // Leaves the factor of each row's output; kPartial for a row that sees other pieces, too, kUnseen for one that sees
    // other pieces only.
    HPC_DEVICE void finish() {
        x.block.each([&](int t) {
            if (t >= x.rows) return;
            const float* sums = x.template shared<float>(x.at.tops) + t * kTokenGroups;
            const float top = x.template shared<float>(x.at.last)[t];
            float sum = 0.0f, weight = 1.0f;
            HPC_UNROLL
            for (int i = 0; i < kTokenGroups; ++i) sum += sums[i];
            const Span seen = x.seen(t);
            const int first = seen.low / kLatentPiece, last = (seen.high - 1) / kLatentPiece;
            const bool here = first <= x.item.piece && x.item.piece <= last;
            if (first < last) {
                partial(t)[0] = top;
                partial(t)[1] = sum;
            } else if (x.a.sinks != nullptr) {
                const float sink = x.a.sinks[x.head_of(t)] * kLog2E, most = sink > top ? sink : top;
                weight = exp2f(top - most);
                sum = sum * weight + exp2f(sink - most);
            }
            x.template shared<float>(x.at.alpha)[t] = !here ? kUnseen : first < last ? kPartial : weight / sum;
        });
    }

    HPC_DEVICE void write() {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int r = 0; r < Math::kOwnRows; ++r) {
                const int row = Math::row_of(t, r);
                if (row >= x.rows) continue;
                const float factor = x.template shared<float>(x.at.alpha)[row];
                if (factor == kUnseen) continue;
                const int64_t to = x.token_of(row) * x.a.stride + int64_t{x.head_of(row)} * x.h.v_dim;
                float* part = partial(row) + 2;
                HPC_UNROLL
                for (int d = 0; d < Math::kOwnDims; ++d) {
                    const int dim = Math::dim_of(t, d);
                    const float value = math.value(t, r, d);
                    if (dim >= x.h.v_dim) continue;
                    if (factor == kPartial) {
                        part[dim] = value;
                    } else {
                        store_act(x.a.out, x.a.type, to + dim, value * factor);
                    }
                }
            }
        });
    }
};

// Grid: item.
template <class Math>
HPC_DEVICE void latent(Block& block, const LatentArgs& a) {
    Latent<Math>(block, a).run();
}

}  // namespace hpcdecode
