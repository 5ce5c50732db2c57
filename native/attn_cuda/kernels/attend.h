// Attention of 16 query rows of one KV head over one piece of its sequence, to a partial result.
//
// Tiles of 64 tokens go through shared memory. While a tile is scored, its values are on their way; while its values
// are summed, the keys of the next tile are. Sums are float32.
#pragma once
#include <type_traits>

#include "by_float.h"
#include "by_tensor.h"
#include "place.h"
#include "rotate.h"

namespace hpcdecode {

struct Eight {
    float v[8];
};

// N: of Math.
template <class Num, int N>
struct Attend {
    using Math = std::conditional_t<Num::kTensor, ByTensor<Num, N>, ByFloat<Num, N>>;
    static constexpr bool kKMiddle = Num::K::kMiddle, kVMiddle = Num::V::kMiddle;

    Block& block;
    const AttendArgs& a;
    const HeadLayout& h;
    Item item;
    SequenceArgs sequence;
    Stage stage;
    int rows, begin, end;  // query rows; positions, from the first one of a tile

    Own<float> top, sum;  // of row t / 8: the greatest score so far, and the weights' sum relative to it
    Own<float> q_sum;     // of row t / 8: the scaled query's sum, which K's middles are multiplied by
    Own<float> middle;    // of row t / 8: the sum of V's middles, weighted as `sum` is
    Math math;
    Own<Place> next;  // of token t of the next tile, t < 64
    Own<uint32_t> next_scales, next_middles;

    template <class T>
    HPC_DEVICE T* shared(int offset) const {
        return stage.shared<T>(offset);
    }

    HPC_DEVICE Attend(Block& b, const AttendArgs& args)
        : block(b),
          a(args),
          h(args.layer.head),
          item(args.batch.items[b.x]),
          sequence(args.batch.sequences[item.sequence]),
          stage{b, args.layer.head, Shared::of(args.layer.head, Num::kTensor)} {
        const int first = item.row_block * kRows, all = sequence.count * a.layer.group;
        rows = all - first < kRows ? all - first : kRows;
        const int low = visible(a.layer, sequence, first).low, high = visible(a.layer, sequence, first + rows - 1).high;
        begin = item.piece * kPiece;
        end = begin + kPiece;
        if (low > begin) begin = low / kTile * kTile;
        if (high < end) end = high;
    }

    HPC_DEVICE void run() {
        if (begin >= end) return;
        load_queries();
        look_up(begin);
        note(begin);
        block.sync();
        load(stage.at.k, stage.at.k_rows, stage.at.k_stride, h.k_row);
        load(stage.at.v, stage.at.v_rows, stage.at.v_stride, h.v_row);
        for (int base = begin; base < end; base += kTile) {
            arrive();
            look_up(base + kTile);
            math.score(stage);
            note(base + kTile);
            block.sync();
            weigh(base);
            load(stage.at.k, stage.at.k_rows, stage.at.k_stride, h.k_row);
            arrive();
            math.add(stage);
            block.sync();
            load(stage.at.v, stage.at.v_rows, stage.at.v_stride, h.v_row);
        }
        write();
    }

    // Returns dim d of query row `row`, null beyond the last ones.
    HPC_DEVICE float query(int row, int d) const {
        if (row >= rows || d >= h.k_dim) return 0.0f;
        const int q_row = item.row_block * kRows + row, head = block.y * a.layer.group + q_row % a.layer.group;
        const int64_t token = sequence.first_row + q_row / a.layer.group;
        return load_act(a.q.data, a.q.type, token * a.q.stride + head * h.k_dim + d);
    }

    HPC_DEVICE void load_queries() {
        float* rotated = shared<float>(stage.at.k);  // [kRows][k_dim], before the first keys come
        if constexpr (Num::kScaled) {
            const float part = 1.0f / static_cast<float>(h.k_rotation);
            block.each([&](int t) {
                for (int i = t; i < kRows * h.k_dim; i += kThreads) rotated[i] = query(i / h.k_dim, i % h.k_dim) * part;
            });
            rotate(block, rotated, kRows * h.k_dim, h.k_rotation);
            if constexpr (kKMiddle) sum_queries(rotated);
        }
        block.each([&](int t) {
            top[t] = -infinity();
            sum[t] = 0.0f;
            if constexpr (kVMiddle) middle[t] = 0.0f;
            math.clear(t);
            for (int i = t; i < kRows * h.k_pad; i += kThreads) {
                const int row = i / h.k_pad, d = i % h.k_pad;
                if constexpr (Num::kScaled) {
                    math.put_query(stage, row, d, d < h.k_dim ? rotated[row * h.k_dim + d] : 0.0f);
                } else {
                    math.put_query(stage, row, d, query(row, d));
                }
            }
        });
    }

    HPC_DEVICE void sum_queries(const float* rotated) {
        block.each([&](int t) {
            q_sum[t] = 0.0f;
            for (int d = t % 8; d < h.k_dim; d += 8) q_sum[t] += rotated[t / 8 * h.k_dim + d];
        });
        sum_of<8>(block, q_sum);
        block.each([&](int t) { q_sum[t] *= a.layer.scale; });
    }

    // Begins to read the block ids of the tile at `base`.
    HPC_DEVICE void look_up(int base) {
        block.each([&](int t) {
            if (t >= kTile || base + t >= end) return;
            next[t] = place_of(a.batch, a.layer, sequence, block.y, base + t);
            if constexpr (Num::kScaled) next_scales[t] = *reinterpret_cast<const uint32_t*>(scales(h, next[t]));
            if constexpr (kKMiddle) {
                next_middles[t] = *reinterpret_cast<const uint32_t*>(middles(h, next[t]));
            } else if constexpr (kVMiddle) {
                next_middles[t] = *middles(h, next[t]);
            }
        });
    }

    // Leaves it in shared memory; null beyond the last token.
    HPC_DEVICE void note(int base) {
        block.each([&](int t) {
            if (t >= kTile) return;
            const bool there = base + t < end;
            shared<const uint8_t*>(stage.at.k_rows)[t] = there ? k_row(h, next[t]) : nullptr;
            shared<const uint8_t*>(stage.at.v_rows)[t] = there ? v_row(h, next[t]) : nullptr;
            if constexpr (Num::kScaled) {
                const int at = base / kTile % 2 * kTile + t;
                const uint32_t both = there ? next_scales[t] : 0;
                shared<float>(stage.at.k_scales)[at] = float_of_bf16(both & 0xffffu);
                shared<float>(stage.at.v_scales)[at] = float_of_bf16(both >> 16);
                if constexpr (kVMiddle) {
                    const uint32_t of_both = there ? next_middles[t] : 0;
                    if constexpr (kKMiddle) shared<float>(stage.at.k_middles)[at] = float_of_bf16(of_both & 0xffffu);
                    shared<float>(stage.at.v_middles)[at] = float_of_bf16(kKMiddle ? of_both >> 16 : of_both);
                }
            }
        });
    }

    // Starts one group of copies: the rows of a tile, zeros for rows beyond the last token.
    HPC_DEVICE void load(int to, int from, int stride, int bytes) {
        block.each([&](int t) {
            const int down = kThreads * 16 / bytes, right = kThreads * 16 % bytes;
            for (int token = t * 16 / bytes, at = t * 16 % bytes; token < kTile; token += down, at += right) {
                if (at >= bytes) {
                    at -= bytes;
                    if (++token == kTile) break;
                }
                const uint8_t* row = shared<const uint8_t*>(from)[token];
                block.copy16(block.smem + to + token * stride + at, row ? row + at : a.layer.base, row != nullptr);
            }
            block.commit();
        });
    }

    // Waits, for every thread, until all groups but the last are there.
    HPC_DEVICE void arrive() {
        block.each([&](int) { block.template wait<1>(); });
        block.sync();
    }

    // Turns scores into weights relative to 2^top. Thread t has every eighth token of row t / 8.
    HPC_DEVICE void weigh(int base) {
        Own<Eight> s;
        Own<float> high, fade, part, of_middles;
        const int side = base / kTile % 2 * kTile;
        block.each([&](int t) {
            const Span seen = t / 8 < rows ? visible(a.layer, sequence, item.row_block * kRows + t / 8) : Span{0, 0};
            high[t] = -infinity();
            HPC_UNROLL
            for (int j = 0; j < 8; ++j) {
                const int i = t % 8 + j * 8;
                float x = shared<float>(stage.at.scores)[t / 8 * kScoreStride + i] * a.layer.scale;
                if constexpr (Num::kScaled) x *= shared<float>(stage.at.k_scales)[side + i];
                if constexpr (kKMiddle) x += q_sum[t] * shared<float>(stage.at.k_middles)[side + i];
                if (a.layer.softcap > 0.0f) x = a.layer.softcap * tanhf(x / a.layer.softcap);
                s[t].v[j] = base + i >= seen.low && base + i < seen.high ? x * kLog2E : -infinity();
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
            if constexpr (kVMiddle) of_middles[t] = 0.0f;
            HPC_UNROLL
            for (int j = 0; j < 8; ++j) {
                const int i = t % 8 + j * 8;
                float w = none ? 0.0f : math.rounded(exp2f(s[t].v[j] - now));
                part[t] += w;
                if constexpr (kVMiddle) of_middles[t] += w * shared<float>(stage.at.v_middles)[side + i];
                if constexpr (Num::kScaled) w *= shared<float>(stage.at.v_scales)[side + i];
                shared<float>(stage.at.scores)[t / 8 * kScoreStride + i] = w;
            }
            if (t % 8 == 0) shared<float>(stage.at.alpha)[t / 8] = fade[t];
        });
        sum_of<8>(block, part);
        block.each([&](int t) { sum[t] = sum[t] * fade[t] + part[t]; });
        if constexpr (kVMiddle) {
            sum_of<8>(block, of_middles);
            block.each([&](int t) { middle[t] = middle[t] * fade[t] + of_middles[t]; });
        }
    }

    HPC_DEVICE void write() {
        const int stride = 2 + h.v_pad;
        float* out = a.partials + (static_cast<int64_t>(block.x) * a.layer.heads + block.y) * kRows * stride;
        float* added = shared<float>(stage.at.alpha);  // to all dims of a row
        if constexpr (kVMiddle) {
            block.each([&](int t) {
                if (t % 8 == 0) added[t / 8] = middle[t];
            });
            block.sync();
        }
        block.each([&](int t) {
            if (t % 8 == 0 && t / 8 < rows) {
                out[t / 8 * stride] = top[t];
                out[t / 8 * stride + 1] = sum[t];
            }
            HPC_UNROLL
            for (int n = 0; n < N; ++n) {
                HPC_UNROLL
                for (int i = 0; i < 4; ++i) {
                    const int row = math.row_of(t, n, i), dim = math.dim_of(t, n, i);
                    if (row < rows && dim < h.v_pad)
                        out[row * stride + 2 + dim] = math.acc[t].v[n][i] + (kVMiddle ? added[row] : 0.0f);
                }
            }
        });
    }
};

// Grid: item, KV head.
template <class Num, int N>
HPC_DEVICE void attend(Block& block, const AttendArgs& a) {
    Attend<Num, N>(block, a).run();
}

}  // namespace hpcdecode
