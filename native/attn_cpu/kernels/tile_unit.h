// The tile registers of AMX, numbered as TileUnit::configure shapes them.
//
// A tile product is C[m][n] += A[m][k] * B[k][n]. Rows of A and columns of B hold pairs (bfloat16) or quads (bytes)
// along k. Rows of B are units of the KV cache as they lie there.
//
// Tiles 0 to 3 are C, `rows` x 16 words. Tile 4 is A, `rows` x 16 words; tile 5 is B, 16 x 16 words. Tiles 6 and 7 are
// halves of A, with 8 words a row, and of B, with 8 rows.
#pragma once
#include "target.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

class TileUnit {
  public:
    ~TileUnit() {
        if (rows_ > 0) asm volatile("tilerelease");
    }
    void configure(int rows) {
        if (rows == rows_) return;
        Shape shape;
        for (int i = 0; i < 8; ++i) shape.tile(i, i == 5 ? 16 : i == 7 ? 8 : rows, i == 6 ? 32 : 64);
        shape.load();
        rows_ = rows;
    }
    // Shapes all tiles to 16 x 16 words.
    void configure_panels() {
        if (rows_ == kPanels) return;
        Shape shape;
        for (int i = 0; i < 8; ++i) shape.tile(i, 16, 64);
        shape.load();
        rows_ = kPanels;
    }

  private:
    struct Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};

        void tile(int i, int count, int bytes) {
            rows[i] = static_cast<uint8_t>(count);
            row_bytes[i] = static_cast<uint16_t>(bytes);
        }
        void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
    };
    static constexpr int kPanels = 32;
    int rows_ = 0;
};

template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_add_pairs() {  // bfloat16 x bfloat16 to float
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_add_quads() {  // int8 x int8 to int32
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_add_unsigned_quads() {  // uint8 x int8 to int32
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
