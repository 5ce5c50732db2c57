// Numbers too small for all of their bits (below 1.2e-38) taken for zero.
//
// A head that forgets fast multiplies its state by numbers near 1e-38. Processors take some 100 cycles for a product
// that is a denormal: the recurrence of such a head was 50 times slower.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <cstdint>

namespace hpcdecode {

// Flushes denormals on this thread while it lives.
class FlushDenormals {
  public:
    FlushDenormals() : before_(mode()) { set(before_ | kFlush); }
    ~FlushDenormals() { set(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
#if defined(__x86_64__)
    static constexpr uint64_t kFlush = 0x8040;  // results, and what is read
    static uint64_t mode() { return _mm_getcsr(); }
    static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
    static constexpr uint64_t kFlush = uint64_t{1} << 24;
    static uint64_t mode() {
        uint64_t mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
    static constexpr uint64_t kFlush = 0;
    static uint64_t mode() { return 0; }
    static void set(uint64_t) {}
#endif
    uint64_t before_;
};

}  // namespace hpcdecode
