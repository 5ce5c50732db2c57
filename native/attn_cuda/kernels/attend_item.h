// One piece of a sequence of a KV head, and the query rows that attend over it by products of 16 bits.
#pragma once
#include "attend_shared.h"
#include "piece_rows.h"
#include "rotate.h"

namespace hpcdecode {

struct AttendItem : PieceRows {
    Block& block;
    const AttendArgs& a;
    const HeadLayout& h;
    AttendShared at;

    HPC_DEVICE AttendItem(Block& b, const AttendArgs& args)
        : PieceRows(args.batch, args.layer, b.x, kRows, kPiece, kTile),
          block(b),
          a(args),
          h(args.layer.head),
          at(AttendShared::of(args.layer.head, args.form)) {}

    template <class T>
    HPC_DEVICE T* shared(int offset) const {
        return reinterpret_cast<T*>(block.smem + offset);
    }
    // Returns a float of the first token of a slice: that of the warp of thread t, at a stage.
    HPC_DEVICE float* token_floats(int t, int stage, TokenFloat which) const {
        return shared<float>(at.floats) + ((t / kWarp * a.form.stages + stage) * kTokenFloats + which) * kSlice;
    }

    // Calls put(row, d, x) for the queries of all rows, times `factor`; beyond the last row and dim they are 0.
    template <class Put>
    HPC_DEVICE void each_query(int dims, float factor, Put&& put) const {
        block.each([&](int t) {
            for (int row = t / kWarp; row < kRows; row += kWarps) {
                const int64_t first =
                    row < rows ? token_of(row) * a.q.stride + query_column(a, block.y, head_of(row)) : 0;
                HPC_UNROLL4
                for (int d = t % kWarp; d < dims; d += kWarp) {
                    const bool there = row < rows && d < h.k_dim;
                    put(row, d, there ? load_act(a.q.data, a.q.type, first + d) * factor : 0.0f);
                }
            }
        });
    }

    // Leaves the rotated queries as floats in shared memory, and the scaled sum of each row.
    HPC_DEVICE void rotate_queries() const {
        float *rotated = shared<float>(at.rotated), *q_sums = shared<float>(at.q_sums);
        each_query(h.k_dim, 1.0f / static_cast<float>(h.k_rotation),
                   [&](int row, int d, float x) { rotated[row * h.k_dim + d] = x; });
        rotate(block, rotated, kRows * h.k_dim, h.k_rotation);
        Own<float> sum;
        block.each([&](int t) {
            sum[t] = 0.0f;
            for (int d = t % 8; d < h.k_dim; d += 8) sum[t] += rotated[t / 8 * h.k_dim + d];
        });
        sum_of<8>(block, sum);
        block.each([&](int t) {
            if (t % 8 == 0) q_sums[t / 8] = sum[t] * a.layer.scale;
        });
    }
};

}  // namespace hpcdecode
