// Fragments of products from shared memory (ldmatrix): four matrices of 8 x 8 elements of 16 bits to a warp.
//
// Lane 8 m + r says where row r of matrix m lies, 16 bytes. Lane l receives of each matrix the elements 2 (l % 4) and
// the next one of row l / 4; of a turned matrix those of rows 2 (l % 4) and the next one, in column l / 4. All rows lie
// `offset` bytes further.
#pragma once
#include "mma.h"

namespace hpcdecode {

#ifdef __CUDACC__

template <bool kTurned>
HPC_DEVICE void load_matrices(Block&, const Own<const uint8_t*>& from, Own<FragmentA>& to, int offset = 0) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(from.value)) + offset;
    uint32_t* r = to.value.r;
    if constexpr (kTurned) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    }
}

#else

// Returns what a lane receives; `row` returns the address that a lane gave.
template <bool kTurned, class Row>
FragmentA matrices_of(int lane, Row&& row) {
    FragmentA f;
    for (int m = 0; m < 4; ++m) {
        uint16_t x[2];
        for (int i = 0; i < 2; ++i) {
            const int across = lane % 4 * 2 + i, down = lane / 4;
            const uint8_t* from = row(m * 8 + (kTurned ? across : down));
            std::memcpy(&x[i], from + 2 * (kTurned ? down : across), 2);
        }
        f.r[m] = pair(x[0], x[1]);
    }
    return f;
}

#ifdef HPCDECODE_BLOCK_THREADS

template <bool kTurned>
void load_matrices(Block& block, const Own<const uint8_t*>& from, Own<FragmentA>& to, int offset = 0) {
    const int first = block.thread / kWarp * kWarp;
    block.among_lanes(from.value, [&](auto of) {
        to.value = matrices_of<kTurned>(block.thread % kWarp, [&](int lane) { return of(first + lane) + offset; });
    });
}

#else

template <bool kTurned>
void load_matrices(Block& block, const Own<const uint8_t*>& from, Own<FragmentA>& to, int offset = 0) {
    for (int t = 0; t < block.threads; ++t)
        to[t] = matrices_of<kTurned>(t % kWarp, [&](int lane) { return from[t / kWarp * kWarp + lane] + offset; });
}

#endif
#endif

// The two 16 x 8 operands that four matrices make.
HPC_DEVICE void halves(Block& block, const Own<FragmentA>& both, Own<FragmentB>& first, Own<FragmentB>& second) {
    block.each([&](int t) {
        HPC_UNROLL
        for (int i = 0; i < 2; ++i) {
            first[t].r[i] = both[t].r[i];
            second[t].r[i] = both[t].r[2 + i];
        }
    });
}

}  // namespace hpcdecode
