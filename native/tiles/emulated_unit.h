// Tile registers in plain C++: tile_unit.h describes them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hpcdecode::tiles {
namespace {

struct TileRegister {
    int rows, words;
    uint32_t word[16][16];
};
inline thread_local TileRegister tile_registers[8];

class TileUnit {
  public:
    ~TileUnit() { configure(0); }
    void configure(int rows) {
        for (int i = 0; i < 8; ++i) tile_registers[i] = {i == 5 ? 16 : i == 7 ? 8 : rows, i == 6 ? 8 : 16, {}};
    }
    void configure_gemm(int rows, int words) {
        for (int i = 0; i < 8; ++i) tile_registers[i] = {i < 6 ? rows : words, i == 4 || i == 5 ? words : 16, {}};
    }
};

template <int T>
inline void tile_zero() {
    __builtin_memset(tile_registers[T].word, 0, sizeof tile_registers[T].word);
}
template <int T>
inline void tile_load(const void* p, size_t stride) {
    TileRegister& t = tile_registers[T];
    for (int i = 0; i < t.rows; ++i)
        __builtin_memcpy(t.word[i], static_cast<const uint8_t*>(p) + i * stride, t.words * 4);
}
template <int T>
inline void tile_load_once(const void* p, size_t stride) {
    tile_load<T>(p, stride);
}
template <int T>
inline void tile_store(void* p, size_t stride) {
    const TileRegister& t = tile_registers[T];
    for (int i = 0; i < t.rows; ++i) __builtin_memcpy(static_cast<uint8_t*>(p) + i * stride, t.word[i], t.words * 4);
}

// c[m][n] += add(a[m][k], b[k][n]) over k.
template <class Sum, class Add>
inline void tile_products(TileRegister& c, const TileRegister& a, const TileRegister& b, Add add) {
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.words; ++n) {
            Sum sum = 0, before;
            for (int k = 0; k < a.words; ++k) sum += add(a.word[m][k], b.word[k][n]);
            __builtin_memcpy(&before, &c.word[m][n], 4);
            sum += before;
            __builtin_memcpy(&c.word[m][n], &sum, 4);
        }
}
// The bfloat16 number in the upper half of a word.
inline float upper(uint32_t word) {
    float x;
    word &= 0xffff0000u;
    __builtin_memcpy(&x, &word, 4);
    return x;
}
template <int C, int A, int B>
inline void tile_add_pairs() {
    const auto product = [](uint32_t x, uint32_t y) { return upper(x << 16) * upper(y << 16) + upper(x) * upper(y); };
    tile_products<float>(tile_registers[C], tile_registers[A], tile_registers[B], product);
}
template <class X>
inline int32_t quad_product(uint32_t x, uint32_t y) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i += 8) sum += static_cast<X>(x >> i) * static_cast<int8_t>(y >> i);
    return sum;
}
template <int C, int A, int B>
inline void tile_add_quads() {
    tile_products<int32_t>(tile_registers[C], tile_registers[A], tile_registers[B], quad_product<int8_t>);
}
template <int C, int A, int B>
inline void tile_add_unsigned_quads() {
    tile_products<int32_t>(tile_registers[C], tile_registers[A], tile_registers[B], quad_product<uint8_t>);
}

}  // namespace
}  // namespace hpcdecode::tiles
