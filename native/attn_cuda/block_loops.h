// A block whose threads are loops. A phase ends before the next one begins; its threads run in rising or falling order.
// Copies happen when they are waited for, no sooner.
#pragma once
#include <utility>
#include <vector>

#include "block_base.h"
#include "host_numbers.h"

namespace hpcdecode {

inline bool& falling_order() {
    static thread_local bool falling = false;
    return falling;
}

// The threads of the block that runs on this thread of the system.
inline int& threads_here() {
    static thread_local int threads = kThreads;
    return threads;
}

template <class T>
struct Own {
    std::vector<T> values = std::vector<T>(threads_here());
    T& operator[](int t) { return values[t]; }
    const T& operator[](int t) const { return values[t]; }
};

struct Block {
    Block(int x, int y, uint8_t* smem, int threads) : x(x), y(y), smem(smem), threads(threads) {
        threads_here() = threads;
    }
    int x, y;
    uint8_t* smem;
    int threads;

    template <class F>
    void each(F&& f) {
        for (int i = 0; i < threads; ++i) f(falling_order() ? threads - 1 - i : i);
    }
    void sync() {}
    void sync_warp() {}

    template <class T>
    Own<T> exchange(const Own<T>& x, int mask) const {
        Own<T> out;
        for (int t = 0; t < threads; ++t) out[t] = x[t ^ mask];
        return out;
    }

    // What is on its way may come at any time: it is NaN until it is waited for.
    void copy16(void* to, const void* from, bool there) {
        std::memset(to, 0xff, 16);
        open_.push_back({to, there ? from : nullptr});
    }
    // Threads commit together, so the last of them closes the group of all.
    void commit() {
        if (++committed_ % threads == 0) groups_.push_back(std::exchange(open_, {}));
    }
    template <int N>
    void wait() {
        if (++waited_ % threads != 0) return;
        while (groups_.size() > N) {
            for (const Copy& c : groups_.front()) c.from ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16);
            groups_.erase(groups_.begin());
        }
    }

  private:
    struct Copy {
        void* to;
        const void* from;
    };
    std::vector<Copy> open_;
    std::vector<std::vector<Copy>> groups_;
    int64_t committed_ = 0, waited_ = 0;
};

}  // namespace hpcdecode
