// Attention of 16 query rows of one KV head over one piece of its sequence by products of 16 bits, to a partial result.
//
// Each warp attends over 16 tokens of every tile of 64 by itself: there is no barrier of the block until the sums of
// the four warps are added, in their order. The slices of the next tiles are on their way meanwhile.
#pragma once
#include "by_tensor.h"
#include "slices.h"

namespace hpcdecode {

template <class Num, bool kWide, int kParts>
struct AttendByTensor {
    using Math = ByTensor<Num, kWide, kParts>;
    static constexpr int kBlocks = kWide || kParts == 2 ? 2 : 3;  // of an SM, which registers leave room for
    AttendItem x;
    Slices<Num> slices;
    Math math;

    HPC_DEVICE AttendByTensor(Block& block, const AttendArgs& args) : x(block, args) {}

    HPC_DEVICE void run() {
        if (x.begin >= x.end) return;
        slices.begin(x);
        math.load_queries(x);
        for (int base = x.begin; base < x.end; base += kTile) {
            const int stage = slices.stage;
            slices.arrive(x);
            slices.look_up(x);
            math.score(x, stage);
            slices.settle(x);
            math.weigh(x, base, stage);
            math.add(x, stage);
            x.block.sync_warp();
            slices.load(x);
        }
        x.block.each([&](int) { x.block.template wait<0>(); });
        sum_of_rows<4>(x.block, math.sum);
        if constexpr (Num::V::kMiddle) sum_of_rows<4>(x.block, math.middle);
        leave_tops();
        x.block.sync();
        leave_sums();
        x.block.sync();
        write();
    }

    HPC_DEVICE float* warps_top(int warp, int row) const { return x.shared<float>(x.at.tops) + warp * kRows + row; }
    HPC_DEVICE float* warps_sum(int warp, int row) const { return x.shared<float>(x.at.sums) + warp * kRows + row; }
    HPC_DEVICE float* warps_values(int warp, int row) const {
        return x.shared<float>((warp * kRows + row) * x.at.sums_stride);
    }
    HPC_DEVICE float top_of(int row) const {
        float top = *warps_top(0, row);
        HPC_UNROLL
        for (int warp = 1; warp < kWarps; ++warp) top = fmaxf(top, *warps_top(warp, row));
        return top;
    }

    HPC_DEVICE void leave_tops() {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2; ++i)
                if (t % 4 == 0) *warps_top(t / kWarp, Math::row_of(t, i)) = math.top[t].v[i];
        });
    }

    // Leaves the sums of every warp, relative to the greatest score of all.
    HPC_DEVICE void leave_sums() {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) {
                const int warp = t / kWarp, row = Math::row_of(t, i);
                if (row >= x.rows) continue;
                const float top = top_of(row), part = top == -infinity() ? 0.0f : power_of_2(math.top[t].v[i] - top);
                if (t % 4 == 0) *warps_sum(warp, row) = math.sum[t].v[i] * part;
                put_values(t, i, warps_values(warp, row), part);
            }
        });
    }

    // Writes the values of row i of a lane. Sums of chunks beyond a row of V are nobody's.
    HPC_DEVICE void put_values(int t, int i, float* to, float part) {
        using V = typename Num::V;
        HPC_UNROLL
        for (int n = 0; n < Math::kColumns; ++n) {
            const int chunk = n / V::kSpread;
            if (chunk * 16 >= x.h.v_row) break;
            HPC_UNROLL
            for (int j = 0; j < 2; ++j) {
                const int dim = V::dim_of(x.h.v_pad, chunk, n % V::kSpread, t % 4 * 2 + j);
                if (dim < x.h.v_pad) to[dim] = (math.acc[t].v[n][i * 2 + j] + math.middle[t].v[i]) * part;
            }
        }
    }

    HPC_DEVICE void write() {
        x.block.each([&](int t) {
            if (t < x.rows) {
                float *out = partial_of(x.a, x.block, t), all = *warps_sum(0, t);
                for (int warp = 1; warp < kWarps; ++warp) all += *warps_sum(warp, t);
                out[0] = top_of(t);
                out[1] = all;
            }
            for (int row = 0; row < x.rows; ++row) {
                float* out = partial_of(x.a, x.block, row) + 2;
                for (int d = t; d < x.h.v_pad; d += kThreads) {
                    float all = warps_values(0, row)[d];
                    HPC_UNROLL
                    for (int warp = 1; warp < kWarps; ++warp) all += warps_values(warp, row)[d];
                    out[d] = all;
                }
            }
        });
    }
};

}  // namespace hpcdecode
