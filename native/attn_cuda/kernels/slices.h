// Brings the slices of a piece to shared memory. Each warp copies what it attends over: of every tile of 64 tokens 16.
#pragma once
#include "attend_item.h"

namespace hpcdecode {

// Lane l < 16 finds the row of K of token l of a slice, lane 16 + l its row of V.
template <class Num>
struct Slices {
    static constexpr bool kKMiddle = Num::K::kMiddle, kVMiddle = Num::V::kMiddle;
    static constexpr bool kLate = Num::kScaled;  // whether tokens have floats, which come by way of registers

    struct Cursor {
        int index, in_block;  // of the sequence's blocks; a token
    };
    Own<Cursor> cursor;       // of the next slice
    Cursor step;              // from one tile to the next
    Own<int32_t> id;          // of the token's block
    Own<uint32_t> coming;     // bits of the floats of the slice that was loaded last
    int stage = 0, next = 0;  // of the slice to load next, and the first position of its tile

    HPC_DEVICE static int token_of(int t) { return t / kWarp * kSlice + t % kSlice; }
    HPC_DEVICE static bool of_v(int t) { return t % kWarp >= kSlice; }

    // Starts to load the first slices, one for each stage.
    HPC_DEVICE void begin(const AttendItem& x) {
        next = x.begin;
        step = {kTile / x.h.block_tokens, kTile % x.h.block_tokens};
        x.block.each([&](int t) {
            const int position = next + token_of(t);
            cursor[t] = {position / x.h.block_tokens, position % x.h.block_tokens};
        });
        for (int i = 0; i < x.a.form.stages; ++i) {
            look_up(x);
            load(x);
            settle(x);
            x.block.sync_warp();  // rows are found anew for the next stage
        }
    }

    // Begins to read the block ids of the next slice.
    HPC_DEVICE void look_up(const AttendItem& x) {
        x.block.each([&](int t) {
            if (next + token_of(t) < x.end) id[t] = x.a.batch.blocks[x.sequence.first_block + cursor[t].index];
        });
    }

    // Waits until the slice is there that was loaded first of all stages.
    HPC_DEVICE void arrive(const AttendItem& x) const {
        x.block.each([&](int) {
            switch (x.a.form.stages) {
                case 1:
                    return x.block.template wait<0>();
                case 2:
                    return x.block.template wait<1>();
                case 3:
                    return x.block.template wait<2>();
                default:
                    return x.block.template wait<3>();
            }
        });
        x.block.sync_warp();
    }

    // Starts one group of copies, those of the slice that was looked up; rows beyond the last token are zeros.
    HPC_DEVICE void load(const AttendItem& x) {
        if (next < x.end) {
            find_rows(x);
            x.block.sync_warp();
        }
        x.block.each([&](int t) {
            if (next < x.end) {
                const int to = t / kWarp * x.at.warp + stage * x.at.slice;
                const uint8_t* const* rows = x.shared<const uint8_t*>(x.at.rows) + t / kWarp * kWarp;
                copy_rows(x, to, rows, x.at.k_stride, x.h.k_row, t);
                copy_rows(x, to + x.at.values, rows + kSlice, x.at.v_stride, x.h.v_row, t);
            }
            x.block.commit();
        });
        next += kTile;
        stage = stage + 1 < x.a.form.stages ? stage + 1 : 0;
    }

    HPC_DEVICE void find_rows(const AttendItem& x) {
        x.block.each([&](int t) {
            const HeadLayout& h = x.h;
            const bool there = next + token_of(t) < x.end;
            const Place p{x.a.layer.base + id[t] * h.block_bytes + x.block.y * h.head_bytes, cursor[t].in_block};
            x.shared<const uint8_t*>(x.at.rows)[t] = !there ? x.a.layer.base : of_v(t) ? v_row(h, p) : k_row(h, p);
            if constexpr (kLate) coming[t] = there ? floats_of(h, p, of_v(t)) : 0;
            cursor[t].index += step.index;
            cursor[t].in_block += step.in_block;
            if (cursor[t].in_block < h.block_tokens) return;
            cursor[t].in_block -= h.block_tokens;
            ++cursor[t].index;
        });
    }

    // Returns the scales of a token, or its middles.
    HPC_DEVICE static uint32_t floats_of(const HeadLayout& h, const Place& p, bool of_middles) {
        if (!of_middles) return *reinterpret_cast<const uint32_t*>(scales(h, p));
        if constexpr (kKMiddle) return *reinterpret_cast<const uint32_t*>(middles(h, p));
        if constexpr (kVMiddle) return static_cast<uint32_t>(*middles(h, p)) << 16;
        return 0;
    }

    HPC_DEVICE void copy_rows(const AttendItem& x, int to, const uint8_t* const* rows, int stride, int bytes, int t) {
        if (bytes > 256) {
            copy_by<32>(x, to, rows, stride, bytes, t);
        } else if (bytes > 128) {
            copy_by<16>(x, to, rows, stride, bytes, t);
        } else {
            copy_by<8>(x, to, rows, stride, bytes, t);
        }
    }

    // kLanes neighbouring lanes copy each row, 16 bytes apiece.
    template <int kLanes>
    HPC_DEVICE void copy_by(const AttendItem& x, int to, const uint8_t* const* rows, int stride, int bytes, int t) {
        constexpr int kDown = kWarp / kLanes;
        const int first = t % kWarp / kLanes, left = x.end - next - t / kWarp * kSlice - first;
        for (int at = t % kLanes * 16; at < bytes; at += kLanes * 16) {
            HPC_UNROLL
            for (int i = 0; i < kSlice; i += kDown)
                x.block.copy16(x.block.smem + to + (first + i) * stride + at, rows[first + i] + at, i < left);
            if (kLanes < kWarp) break;
        }
    }

    // Leaves the floats of the slice that was loaded last in shared memory.
    HPC_DEVICE void settle(const AttendItem& x) const {
        if constexpr (kLate) {
            x.block.each([&](int t) {
                const int last = (stage > 0 ? stage : x.a.form.stages) - 1, i = t % kSlice;
                const TokenFloat k = of_v(t) ? kMiddleOfK : kScaleOfK, v = of_v(t) ? kMiddleOfV : kScaleOfV;
                x.token_floats(t, last, k)[i] = float_of_bf16(coming[t] & 0xffffu);
                x.token_floats(t, last, v)[i] = float_of_bf16(coming[t] >> 16);
            });
            x.block.sync_warp();
        }
    }
};

}  // namespace hpcdecode
