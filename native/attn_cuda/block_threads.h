// A block of system threads. Each runs the kernel by itself, as on the device, so that a race detector sees accesses
// that no barrier orders.
#pragma once
#include <pthread.h>

#include <deque>
#include <vector>

#include "block_base.h"
#include "host_numbers.h"

namespace hpcdecode {

template <class T>
struct Own {
    T value{};
    T& operator[](int) { return value; }
    const T& operator[](int) const { return value; }
};

// What the threads of a block share: barriers, and memory for what lanes exchange.
struct Team {
    int threads;
    pthread_barrier_t all, warps[kMostThreads / kWarp];
    alignas(16) uint8_t lanes[kMostThreads][64];
    explicit Team(int threads) : threads(threads) {
        pthread_barrier_init(&all, nullptr, threads);
        for (auto& warp : warps) pthread_barrier_init(&warp, nullptr, kWarp);
    }
    ~Team() {
        pthread_barrier_destroy(&all);
        for (auto& warp : warps) pthread_barrier_destroy(&warp);
    }
};

struct Block {
    int x, y;
    uint8_t* smem;
    Team* team;
    int thread;

    template <class F>
    void each(F&& f) {
        f(thread);
    }
    void sync() { pthread_barrier_wait(&team->all); }
    void sync_warp() { pthread_barrier_wait(&team->warps[thread / kWarp]); }

    // Lays `own` open to the lanes of the warp, and calls `read` with what every thread laid open.
    template <class T, class F>
    void among_lanes(const T& own, F&& read) {
        static_assert(sizeof(T) <= sizeof team->lanes[0], "no room");
        pthread_barrier_t* warp = &team->warps[thread / kWarp];
        std::memcpy(team->lanes[thread], &own, sizeof own);
        pthread_barrier_wait(warp);
        read([this](int t) {
            T x;
            std::memcpy(&x, team->lanes[t], sizeof x);
            return x;
        });
        pthread_barrier_wait(warp);
    }

    template <class T>
    Own<T> exchange(const Own<T>& x, int mask) {
        Own<T> out;
        among_lanes(x.value, [&](auto lane) { out.value = lane(thread ^ mask); });
        return out;
    }

    // What is on its way may come at any time: it is NaN until it is waited for.
    void copy16(void* to, const void* from, bool there) {
        std::memset(to, 0xff, 16);
        open_.push_back({to, there ? from : nullptr});
    }
    void commit() {
        groups_.push_back(std::move(open_));
        open_.clear();
    }
    template <int N>
    void wait() {
        for (; groups_.size() > N; groups_.pop_front())
            for (const Copy& c : groups_.front()) c.from ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16);
    }

  private:
    struct Copy {
        void* to;
        const void* from;
    };
    std::vector<Copy> open_;
    std::deque<std::vector<Copy>> groups_;

  public:
    Block(int x, int y, uint8_t* smem, Team* team, int thread) : x(x), y(y), smem(smem), team(team), thread(thread) {}
};

}  // namespace hpcdecode
