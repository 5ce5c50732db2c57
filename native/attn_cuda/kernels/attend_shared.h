// The shared memory of a block that attends by products of 16 bits.
#pragma once
#include "numbers.h"

namespace hpcdecode {

// What a token has beside its rows.
enum TokenFloat { kScaleOfK, kScaleOfV, kMiddleOfK, kMiddleOfV, kTokenFloats };

// Offsets in shared memory, and sizes in bytes. A warp has `stages` slices, each with rows of K and then of V.
struct AttendShared {
    int k_stride, v_stride, q_stride;
    int values, slice, warp;  // V of a slice begins there; a slice; all slices of a warp
    int sums_stride;          // of a row of the warps' sums, which in the end lie where the slices were
    int q, q_low, rotated, rows, floats, tops, sums, q_sums, bytes;

    HPC_BOTH static AttendShared of(const HeadLayout& h, const AttendForm& f) {
        const bool scaled = h.middles > h.scales;
        AttendShared s{};
        s.k_stride = stride_of(h.k_row);
        s.v_stride = stride_of(h.v_row);
        s.q_stride = stride_of(h.k_pad * 2);
        s.values = kSlice * s.k_stride;
        s.slice = s.values + kSlice * s.v_stride;
        s.warp = f.stages * s.slice;
        s.sums_stride = (h.v_pad + 8) * 4;
        int at = 0;
        const auto take = [&at](int bytes) {
            const int begin = at;
            at += (bytes + 15) / 16 * 16;
            return begin;
        };
        const int slices = kWarps * s.warp, of_warps = kWarps * kRows * s.sums_stride;
        take(slices > of_warps ? slices : of_warps);
        s.q = take(kRows * s.q_stride);
        s.q_low = f.parts == 2 ? take(kRows * s.q_stride) : s.q;
        s.rotated = take(scaled ? kRows * h.k_dim * 4 : 0);
        s.rows = take(kWarps * kWarp * 8);  // where rows of K lie, then those of V
        s.floats = take(scaled ? kWarps * f.stages * kTokenFloats * kSlice * 4 : 0);
        s.tops = take(kWarps * kRows * 4);
        s.sums = take(kWarps * kRows * 4);
        s.q_sums = take(kRows * 4);
        s.bytes = at;
        return s;
    }
};

}  // namespace hpcdecode
