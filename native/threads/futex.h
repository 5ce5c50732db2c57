// Threads that sleep until a word changes.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace hpcdecode {

inline void futex(std::atomic<uint32_t>& word, int op, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Sleeps while the word is `value`; may return before it changes.
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) { futex(word, FUTEX_WAIT, value); }

// Wakes the threads that sleep on a word.
inline void wake_all(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, 1u << 30); }

// Tells the core that this thread only waits.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace hpcdecode
