// The product of a warp, m16n8k16: c += a b. Lane l has, with g = l / 4 and p = 2 * (l % 4),
//   of a [16][16]: (g, p), (g + 8, p), (g, p + 8), (g + 8, p + 8), each with the next column
//   of b [16][8]:  (p, g), (p + 8, g), each with the next row
//   of c [16][8]:  (g, p), (g, p + 1), (g + 8, p), (g + 8, p + 1)
#pragma once
#include "numbers.h"

namespace hpcdecode {

struct FragmentA {
    uint32_t r[4];
};
struct FragmentB {
    uint32_t r[2];
};
template <int N>
struct Sums {
    float v[N][4];

    HPC_DEVICE void clear() {
        HPC_UNROLL
        for (int n = 0; n < N; ++n) {
            HPC_UNROLL
            for (int i = 0; i < 4; ++i) v[n][i] = 0.0f;
        }
    }
};

#ifdef __CUDACC__

template <class Product, int N>
HPC_DEVICE void multiply(Block&, const Own<FragmentA>& a, const Own<FragmentB>& b, Own<Sums<N>>& c, int n) {
    float* v = c.value.v[n];
    const uint32_t *x = a.value.r, *y = b.value.r;
    if constexpr (Product::kHalf) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    }
}

#else

// One warp's product; `a` and `b` return the fragments of a lane, `c` the sums of those that are kept.
template <class Product, class GetA, class GetB, class PutC>
void multiply_warp(GetA&& a, GetB&& b, PutC&& put) {
    const auto low = [](uint32_t r) { return Product::up(static_cast<uint16_t>(r)); };
    const auto high = [](uint32_t r) { return Product::up(static_cast<uint16_t>(r >> 16)); };
    float x[16][16], y[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
        const int g = lane / 4, p = lane % 4 * 2;
        const FragmentA f = a(lane);
        const FragmentB e = b(lane);
        for (int i = 0; i < 4; ++i) {
            x[g + i % 2 * 8][p + i / 2 * 8] = low(f.r[i]);
            x[g + i % 2 * 8][p + i / 2 * 8 + 1] = high(f.r[i]);
        }
        for (int i = 0; i < 2; ++i) {
            y[p + i * 8][g] = low(e.r[i]);
            y[p + i * 8 + 1][g] = high(e.r[i]);
        }
    }
    put([&](int lane, int i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += x[row][k] * y[k][column];
        return sum;
    });
}

#ifdef HPCDECODE_BLOCK_THREADS

template <class Product, int N>
void multiply(Block& block, const Own<FragmentA>& a, const Own<FragmentB>& b, Own<Sums<N>>& c, int n) {
    struct Both {
        FragmentA a;
        FragmentB b;
    };
    const int first = block.thread / kWarp * kWarp, lane = block.thread % kWarp;
    block.among_lanes(Both{a.value, b.value}, [&](auto of) {
        multiply_warp<Product>([&](int l) { return of(first + l).a; }, [&](int l) { return of(first + l).b; },
                               [&](auto sum) {
                                   for (int i = 0; i < 4; ++i) c.value.v[n][i] += sum(lane, i);
                               });
    });
}

#else

template <class Product, int N>
void multiply(Block& block, const Own<FragmentA>& a, const Own<FragmentB>& b, Own<Sums<N>>& c, int n) {
    for (int first = 0; first < block.threads; first += kWarp) {
        multiply_warp<Product>([&](int l) { return a[first + l]; }, [&](int l) { return b[first + l]; },
                               [&](auto sum) {
                                   for (int l = 0; l < kWarp; ++l)
                                       for (int i = 0; i < 4; ++i) c[first + l].v[n][i] += sum(l, i);
                               });
    }
}

#endif
#endif

}  // namespace hpcdecode
