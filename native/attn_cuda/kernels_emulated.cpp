// Runs the kernels on this machine's cores, block by block.
#include <thread>
#include <vector>

#include "kernels/table.h"

namespace hpcdecode {
namespace {

// Fills the shared memory of a block with NaN.
void poison(std::vector<uint64_t>& memory) { std::memset(memory.data(), 0xff, memory.size() * 8); }

#ifdef HPCDECODE_BLOCK_THREADS

// Runs all blocks one after the other, on the same threads.
template <class F>
void run(int x, int y, size_t smem, F&& kernel) {
    std::vector<uint64_t> memory(smem / 8 + 1);
    Team team;
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
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
    for (std::thread& thread : threads) thread.join();
}

#else

// Runs all blocks one after the other, the threads of every second one in falling order.
template <class F>
void run(int x, int y, size_t smem, F&& kernel) {
    std::vector<uint64_t> memory(smem / 8 + 1);
    for (int i = 0; i < x * y; ++i) {
        poison(memory);
        falling_order() = i % 2 == 1;
        Block block(i % x, i / x, reinterpret_cast<uint8_t*>(memory.data()));
        kernel(block);
    }
}

#endif

}  // namespace

void launch_append(const AppendArgs& a, KvType type, void*) {
    with_num(type, [&](auto num) {
        run(a.batch.tokens, a.layer.heads, append_smem(a.layer.head), [&](Block& b) { append<decltype(num)>(b, a); });
    });
}

void launch_attend(const AttendArgs& a, KvType type, void*) {
    with_num(type, [&](auto num) {
        run(a.batch.item_count, a.layer.heads, attend_smem(a.layer.head, type), [&](Block& b) {
            a.layer.head.v_pad <= 128 ? attend<decltype(num), 4>(b, a) : attend<decltype(num), 8>(b, a);
        });
    });
}

void launch_merge(const MergeArgs& a, void*) {
    run(a.batch.tokens, a.layer.heads * a.layer.group, kMergeSmem, [&](Block& b) { merge(b, a); });
}

void launch_copy(const CopyArgs& a, void*) {
    run(a.copies, a.layer_count, 0, [&](Block& b) { copy_blocks(b, a); });
}

}  // namespace hpcdecode
