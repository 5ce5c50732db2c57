// Attention of 16 query rows of one KV head over one piece of its sequence by float32 arithmetic, to a partial result.
//
// Tiles of 64 tokens go through shared memory. While a tile is scored, its values are on their way; while its values
// are summed, the keys of the next tile are.
#pragma once
#include "float_shared.h"
#include "mma.h"
#include "piece_rows.h"

namespace hpcdecode {

struct Eight {
    float v[8];
};

// N / 4: columns of 32 dims of V that each warp sums. Thread t sums dims t % 32 + 32 * (t / 32 + 4 j) of all rows.
template <int N>
struct AttendByFloat : PieceRows {
    static constexpr int kBlocks = 2;  // of an SM, which registers leave room for
    Block& block;
    const AttendArgs& a;
    const HeadLayout& h;
    FloatShared at;

    Own<float> top, sum;  // of row t / 8: the greatest score so far, and the weights' sum relative to it
    Own<Sums<N>> acc;
    Own<Place> next;  // of token t of the next tile, t < 64

    template <class T>
    HPC_DEVICE T* shared(int offset) const {
        return reinterpret_cast<T*>(block.smem + offset);
    }

    HPC_DEVICE AttendByFloat(Block& b, const AttendArgs& args)
        : PieceRows(args.batch, args.layer, b.x, kRows, kPiece, kTile),
          block(b),
          a(args),
          h(args.layer.head),
          at(FloatShared::of(args.layer.head)) {}

    HPC_DEVICE void run() {
        if (begin >= end) return;
        load_queries();
        look_up(begin);
        note(begin);
        block.sync();
        load(begin, at.k, at.k_rows, at.k_stride, h.k_row);
        load(begin, at.v, at.v_rows, at.v_stride, h.v_row);
        for (int base = begin; base < end; base += kTile) {
            arrive<1>();
            look_up(base + kTile);
            score();
            note(base + kTile);
            block.sync();
            weigh(base);
            load(base + kTile, at.k, at.k_rows, at.k_stride, h.k_row);
            arrive<1>();
            add();
            block.sync();
            load(base + kTile, at.v, at.v_rows, at.v_stride, h.v_row);
        }
        arrive<0>();
        write();
    }

    HPC_DEVICE void load_queries() {
        block.each([&](int t) {
            top[t] = -infinity();
            sum[t] = 0.0f;
            acc[t].clear();
            for (int row = t / kWarp; row < kRows; row += kWarps) {
                const int64_t from =
                    row < rows ? token_of(row) * a.q.stride + query_column(a, block.y, head_of(row)) : 0;
                float* to = shared<float>(at.q + row * at.q_stride);
                for (int d = t % kWarp; d < h.k_pad; d += kWarp)
                    to[d] = row < rows && d < h.k_dim ? load_act(a.q.data, a.q.type, from + d) : 0.0f;
            }
        });
    }

    // Begins to read the block ids of the tile at `base`.
    HPC_DEVICE void look_up(int base) {
        block.each([&](int t) {
            if (t < kTile && base + t < end) next[t] = place_of(a.batch, a.layer, sequence, block.y, base + t);
        });
    }

    // Leaves where its rows lie in shared memory; null beyond the last token.
    HPC_DEVICE void note(int base) {
        block.each([&](int t) {
            if (t >= kTile) return;
            const bool there = base + t < end;
            shared<const uint8_t*>(at.k_rows)[t] = there ? k_row(h, next[t]) : nullptr;
            shared<const uint8_t*>(at.v_rows)[t] = there ? v_row(h, next[t]) : nullptr;
        });
    }

    // Starts one group of copies: the rows of the tile at `base`, zeros for rows beyond the last token.
    HPC_DEVICE void load(int base, int to, int from, int stride, int bytes) {
        block.each([&](int t) {
            const int down = kThreads * 16 / bytes, right = kThreads * 16 % bytes;
            const int tokens = base < end ? kTile : 0;
            for (int token = t * 16 / bytes, at = t * 16 % bytes; token < tokens; token += down, at += right) {
                if (at >= bytes) {
                    at -= bytes;
                    if (++token == tokens) break;
                }
                const uint8_t* row = shared<const uint8_t*>(from)[token];
                block.copy16(block.smem + to + token * stride + at, row ? row + at : a.layer.base, row != nullptr);
            }
            block.commit();
        });
    }

    // Waits, for every thread, until all groups but the last `Left` are there.
    template <int Left>
    HPC_DEVICE void arrive() {
        block.each([&](int) { block.template wait<Left>(); });
        block.sync();
    }

    // Thread t scores token t % 64 for 8 of the rows.
    HPC_DEVICE void score() {
        block.each([&](int t) {
            const int token = t % kTile, first = t / kTile * 8;
            const float* key = shared<float>(at.k + token * at.k_stride);
            float s[8] = {};
            for (int d = 0; d < h.k_pad; ++d) {
                HPC_UNROLL
                for (int r = 0; r < 8; ++r) s[r] += shared<float>(at.q + (first + r) * at.q_stride)[d] * key[d];
            }
            HPC_UNROLL
            for (int r = 0; r < 8; ++r) shared<float>(at.scores)[(first + r) * kScoreStride + token] = s[r];
        });
    }

    // Turns scores into weights relative to 2^top. Thread t has every eighth token of row t / 8.
    HPC_DEVICE void weigh(int base) {
        Own<Eight> s;
        Own<float> high, fade, part;
        block.each([&](int t) {
            const Span span = seen(t / 8);
            high[t] = -infinity();
            HPC_UNROLL
            for (int j = 0; j < 8; ++j) {
                const int i = t % 8 + j * 8;
                const float x = log2_score(a.layer, shared<float>(at.scores)[t / 8 * kScoreStride + i] * a.layer.scale);
                s[t].v[j] = base + i >= span.low && base + i < span.high ? x : -infinity();
                high[t] = s[t].v[j] > high[t] ? s[t].v[j] : high[t];
            }
        });
        larger_of<8>(block, high);
        block.each([&](int t) {
            const float now = high[t] > top[t] ? high[t] : top[t];
            const bool none = now == -infinity();
            fade[t] = none ? 1.0f : exp2f(top[t] - now);
            top[t] = now;
            part[t] = 0.0f;
            HPC_UNROLL
            for (int j = 0; j < 8; ++j) {
                const float w = none ? 0.0f : exp2f(s[t].v[j] - now);
                part[t] += w;
                shared<float>(at.scores)[t / 8 * kScoreStride + t % 8 + j * 8] = w;
            }
            if (t % 8 == 0) shared<float>(at.alpha)[t / 8] = fade[t];
        });
        sum_of<8>(block, part);
        block.each([&](int t) { sum[t] = sum[t] * fade[t] + part[t]; });
    }

    HPC_DEVICE static int dim_of(int t, int j) { return t % kWarp + kWarp * (t / kWarp + kWarps * j); }

    HPC_DEVICE void add() {
        block.each([&](int t) {
            HPC_UNROLL
            for (int j = 0; j < N / 4; ++j) {
                if (dim_of(t, j) >= h.v_pad) return;
                HPC_UNROLL
                for (int r = 0; r < kRows; ++r) acc[t].v[j * 4 + r / 4][r % 4] *= shared<float>(at.alpha)[r];
                for (int token = 0; token < kTile; ++token) {
                    const float x = shared<float>(at.v + token * at.v_stride)[dim_of(t, j)];
                    HPC_UNROLL
                    for (int r = 0; r < kRows; ++r)
                        acc[t].v[j * 4 + r / 4][r % 4] += shared<float>(at.scores)[r * kScoreStride + token] * x;
                }
            }
        });
    }

    HPC_DEVICE void write() {
        block.each([&](int t) {
            if (t % 8 == 0 && t / 8 < rows) {
                partial_of(a, block, t / 8)[0] = top[t];
                partial_of(a, block, t / 8)[1] = sum[t];
            }
            HPC_UNROLL
            for (int j = 0; j < N / 4; ++j) {
                HPC_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    if (r < rows && dim_of(t, j) < h.v_pad)
                        partial_of(a, block, r)[2 + dim_of(t, j)] = acc[t].v[j * 4 + r / 4][r % 4];
                }
            }
        });
    }
};

}  // namespace hpcdecode
