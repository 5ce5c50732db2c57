// The kernels of recurrent states, and which of them take tokens through a layer.
#pragma once
#include <type_traits>

#include "state_lanes.h"

namespace hpcdecode {

HPC_BOTH int parts_of(int64_t n, int64_t size) { return static_cast<int>((n + size - 1) / size); }

// Grid: parts of sequences' tokens, parts of their channels.
struct Convolve {
    static constexpr int kMost = kThreads;
    HPC_DEVICE static void run(Block& block, const StatesArgs& a) {
        const int parts = parts_of(a.longest, kConvolvedTogether);
        const StateSequence s(a, block.x / parts);
        block.each([&](int t) {
            const int64_t channel = static_cast<int64_t>(block.y) * kThreads + t;
            if (channel < a.layer.channels) convolve_channel(a, s, block.x % parts, channel);
        });
    }
};

// Grid: parts of sequences' channels. For layers without states.
struct KeepWindows {
    static constexpr int kMost = kThreads;
    HPC_DEVICE static void run(Block& block, const StatesArgs& a) {
        const int parts = parts_of(a.layer.channels, kThreads);
        keep_window(block, a, StateSequence(a, block.x / parts), block.x % parts, parts, kThreads);
    }
};

// Grid: heads of sequences, parts of a head's columns.
template <class Num, int kRows, bool kDelta, bool kByRow>
struct RecurHeads {
    static constexpr int kMost = kMostThreads;
    HPC_DEVICE static void run(Block& block, const StatesArgs& a) {
        HeadRecurrence<Num, kRows, kDelta, kByRow>(block, a).run();
    }
};

// Grid: parts of sequences' heads.
template <class Num, int kRows>
struct RecurLanes {
    static constexpr int kMost = kThreads;
    HPC_DEVICE static void run(Block& block, const StatesArgs& a) {
        const int parts = parts_of(a.layer.heads, kThreads), part = block.x % parts;
        const StateSequence s(a, block.x / parts);
        keep_window(block, a, s, part, parts, kThreads);
        block.each([&](int t) {
            const int head = part * kThreads + t;
            if (head >= a.layer.heads) return;
            LaneRecurrence<Num, kRows> own(a, head);
            own.load(s.place);
            for (int64_t i = 0; i < s.count; ++i) own.token(s.first + i);
            own.store(s.place);
        });
    }
};

// Calls go(kernel, x and y of the grid, bytes of shared memory, threads) for a layer whose heads have many values.
template <class Num, int kRows, class Go>
void go_through_heads(const StatesArgs& a, Go&& go) {
    const StatesLayer& l = a.layer;
    const HeadForm f(l, kRows * kRowLanes);
    const auto with = [&](auto delta, auto by_row) {
        constexpr bool kDelta = decltype(delta)::value, kByRow = decltype(by_row)::value;
        go(RecurHeads<Num, kRows, kDelta, kByRow>(), a.sequence_count * l.heads, f.blocks(l), f.floats * 4,
           f.warps * kWarp);
    };
    const auto with_delta = [&](auto delta) {
        l.decay_dim > 1 ? with(delta, std::true_type()) : with(delta, std::false_type());
    };
    l.delta ? with_delta(std::true_type()) : with_delta(std::false_type());
}

template <class Num, class Go>
void go_through_states(const StatesArgs& a, Go&& go) {
    const StatesLayer& l = a.layer;
    if (l.v_dim == 1) {
        const int blocks = a.sequence_count * parts_of(l.heads, kThreads);
        if (l.k_dim <= 16) return go(RecurLanes<Num, 16>(), blocks, 1, 0, kThreads);
        return go(RecurLanes<Num, kMostLaneRows>(), blocks, 1, 0, kThreads);
    }
    if (l.k_dim <= 32) return go_through_heads<Num, 4>(a, go);
    if (l.k_dim <= 64) return go_through_heads<Num, 8>(a, go);
    if (l.k_dim <= 128) return go_through_heads<Num, 16>(a, go);
    go_through_heads<Num, kMostHeadRows / kRowLanes>(a, go);
}

// Calls go, as above, for every kernel that takes tokens through a layer, in order.
template <class Go>
void go_through(const StatesArgs& a, Go&& go) {
    const StatesLayer& l = a.layer;
    const int channels = parts_of(l.channels, kThreads);
    if (l.taps > 0) go(Convolve(), a.sequence_count * parts_of(a.longest, kConvolvedTogether), channels, 0, kThreads);
    if (l.k_dim == 0) return go(KeepWindows(), a.sequence_count * channels, 1, 0, kThreads);
    l.bf16_states ? go_through_states<uint16_t>(a, go) : go_through_states<float>(a, go);
}

}  // namespace hpcdecode
