// Runs the blocks of a kernel on this machine's cores, one after the other.
#pragma once
#include <thread>
#include <vector>

#include "block.h"

namespace hpcdecode {

// Fills the shared memory of a block with NaN.
inline void poison(std::vector<uint64_t>& memory) { std::memset(memory.data(), 0xff, memory.size() * 8); }

#ifdef HPCDECODE_BLOCK_THREADS

// Runs x * y blocks of so many threads, on the same threads of the system. smem: Bytes of shared memory.
template <class F>
void run(int x, int y, size_t smem, F&& kernel, int block_threads = kThreads) {
    std::vector<uint64_t> memory(smem / 8 + 1);
    Team team(block_threads);
    const auto work = [&](int thread) {
        for (int i = 0; i < x * y; ++i) {
            if (thread == 0) poison(memory);
            Block block(i % x, i / x, reinterpret_cast<uint8_t*>(memory.data()), &team, thread);
            block.sync();
            kernel(block);
            block.sync();
        }
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < block_threads; ++t) threads.emplace_back(work, t);
    for (std::thread& thread : threads) thread.join();
}

#else

// Runs x * y blocks of so many threads, those of every second one in falling order. smem: Bytes of shared memory.
template <class F>
void run(int x, int y, size_t smem, F&& kernel, int block_threads = kThreads) {
    std::vector<uint64_t> memory(smem / 8 + 1);
    for (int i = 0; i < x * y; ++i) {
        poison(memory);
        falling_order() = i % 2 == 1;
        Block block(i % x, i / x, reinterpret_cast<uint8_t*>(memory.data()), block_threads);
        kernel(block);
    }
}

#endif

}  // namespace hpcdecode
