// The tile registers of AMX: tile_unit.h describes them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hpcdecode::tiles {
namespace {

class TileUnit {
  public:
    ~TileUnit() {
        if (shape_ != kNone) asm volatile("tilerelease");
    }
    void configure(int rows) {
        if (!changes(rows)) return;
        Shapes shapes;
        for (int i = 0; i < 8; ++i) shapes.tile(i, i == 5 ? 16 : i == 7 ? 8 : rows, i == 6 ? 8 : 16);
        shapes.load();
    }
    void configure_gemm(int rows, int words) {
        if (!changes(kGemm + words * 32 + rows)) return;
        Shapes shapes;
        for (int i = 0; i < 8; ++i) shapes.tile(i, i < 6 ? rows : words, i == 4 || i == 5 ? words : 16);
        shapes.load();
    }

  private:
    struct Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};

        void tile(int i, int count, int words) {
            rows[i] = static_cast<uint8_t>(count);
            row_bytes[i] = static_cast<uint16_t>(4 * words);
        }
        void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
    };
    static constexpr int kNone = 0, kGemm = 32;

    bool changes(int shape) {
        const bool other = shape != shape_;
        shape_ = shape;
        return other;
    }
    int shape_ = kNone;
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
inline void tile_load_once(const void* p, size_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
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
}  // namespace hpcdecode::tiles
