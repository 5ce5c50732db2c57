#include "chain.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int64_t kLeastPrograms = 4;              // tokens of a group: waking a thread costs about as much
constexpr int64_t kLeastProducts = 2 * kTileRows;  // below, groups would read weights for few tokens each
constexpr int64_t kBlock = 8 * kTileRows;          // tokens

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Barrier {
  public:
    void wait(int members) {
        if (members == 1) return;
        const unsigned phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int turn = 0; phase_.load(std::memory_order_acquire) == phase; ++turn) {
            if (turn < kSpins) {
                pause();
            } else {
                sched_yield();
            }
        }
    }

  private:
    static constexpr int kSpins = 4000;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> phase_{0};
};

}  // namespace

struct alignas(64) Chain::Group {
    Barrier barrier;
    int64_t block = 0;
    char* memory = nullptr;
};

struct Chain::Call {
    const Rows* given;
    int64_t tokens;
    Group* groups;
    std::atomic<int64_t>* next;
    RowAttention* attention;
    int64_t blocks = 0;
};

struct Chain::Member {
    int thread, number, of;  // of its group's threads
};

Chain::Chain(std::vector<Stage> stages, int given, std::vector<Passed> passed)
    : stages_(std::move(stages)), given_(given), passed_(std::move(passed)) {
    const int tensors = given_ + static_cast<int>(passed_.size());
    for (const Stage& stage : stages_) {
        const auto* program = std::get_if<Program>(&stage.work);
        const bool attends = std::holds_alternative<Attention>(stage.work);
        const size_t needed = program != nullptr ? program->tensors() : attends ? 2 : 3;
        const auto known = [&](int i) { return i >= 0 && i < tensors; };
        if (stage.tensors.size() != needed || !std::all_of(stage.tensors.begin(), stage.tensors.end(), known)) {
            throw std::invalid_argument("chain: expected " + std::to_string(needed) + " tensors of " +
                                        std::to_string(tensors) + " for every stage");
        }
        multiplies_ = multiplies_ || std::holds_alternative<Product>(stage.work);
        attends_ = attends_ || attends;
    }
    for (const Passed& p : passed_) passed_bytes_ = std::max(passed_bytes_, p.at + p.bytes);
}

int Chain::groups(int64_t tokens, int threads) const {
    const int64_t least = multiplies_ ? kLeastProducts : kLeastPrograms;
    return static_cast<int>(std::clamp<int64_t>(tokens / least, 1, threads));
}

void Chain::run(int64_t tokens, int threads, const std::vector<Rows>& given, RowAttention* attention) const {
    if (attends_ != (attention != nullptr)) throw std::invalid_argument("chain: expected attention where it has any");
    const int most = groups(tokens, threads), useful = multiplies_ ? threads : most;
    static thread_local std::vector<char> memory;
    const int64_t of_a_group = (std::min(tokens, kBlock) * passed_bytes_ + kLine) & -kLine;
    if (static_cast<int64_t>(memory.size()) < most * of_a_group + kLine) memory.resize(most * of_a_group + kLine);
    auto* aligned = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kLine - 1));
    const auto held = std::make_unique<Group[]>(most);
    for (int g = 0; g < most; ++g) held[g].memory = aligned + g * of_a_group;
    std::atomic<int64_t> next{0};

    struct Work {
        const Chain* chain;
        Call call;
    } work{this, {given.data(), tokens, held.get(), &next, attention}};
    const auto enter = [](void* data, int thread, int threads) {
        const Work& w = *static_cast<const Work*>(data);
        w.chain->join_group(w.call, thread, threads);
    };
    if (attends_) attention->begin(tokens, threads);
    run_team(threads, useful, enter, &work);
    if (attends_) attention->end();
}

void Chain::join_group(Call call, int thread, int threads) const {
    const int count = groups(call.tokens, threads);
    int group = 0;
    while (share(threads, group + 1, count) <= thread) ++group;
    const int64_t first = share(threads, group, count), end = share(threads, group + 1, count);
    const int64_t rounds = (call.tokens + count * kBlock - 1) / (count * kBlock);
    call.blocks = multiplies_ || passed_bytes_ > 0 ? count * rounds : count;
    take_blocks(call, call.groups[group], {thread, static_cast<int>(thread - first), static_cast<int>(end - first)});
}

void Chain::take_blocks(const Call& call, Group& group, const Member& me) const {
    while (true) {
        if (me.number == 0) group.block = call.next->fetch_add(1);
        group.barrier.wait(me.of);
        const int64_t block = group.block;
        if (block >= call.blocks) return;
        run_block(call, group, block, me);
    }
}

void Chain::run_block(const Call& call, Group& group, int64_t block, const Member& me) const {
    const int64_t first = attends_ ? block : share(call.tokens, block, call.blocks), step = attends_ ? call.blocks : 1;
    const int64_t count =
        attends_ ? (call.tokens - block + step - 1) / step : share(call.tokens, block + 1, call.blocks) - first;
    const int64_t from = share(count, me.number, me.of), to = share(count, me.number + 1, me.of);
    std::vector<Rows> all, own;
    for (int i = 0; i < given_; ++i) {
        const Rows& rows = call.given[i];
        all.push_back({rows.data + first * rows.row_bytes, step * rows.row_bytes});
    }
    for (const Passed& p : passed_) all.push_back({group.memory + p.at * count, p.bytes});
    for (size_t s = 0; s < stages_.size(); ++s) {
        const Stage& stage = stages_[s];
        own.clear();
        for (int i : stage.tensors) own.push_back(all[i]);
        if (const auto* program = std::get_if<Program>(&stage.work)) {
            program->run(from, to, own.data());
        } else if (const auto* product = std::get_if<Product>(&stage.work)) {
            product->run(count, own[0], own[1], own[2], me.number, me.of, next_weights(all.data(), s, me));
        } else {
            const Rows &qkv = own[0], &out = own[1];
            const int64_t every = me.of, mine = (count - me.number + every - 1) / every;
            const auto at = [&](const Rows& r) { return reinterpret_cast<uint8_t*>(r.data + me.number * r.row_bytes); };
            call.attention->attend(std::get<Attention>(stage.work).layer, me.thread,
                                   {first + me.number * step, step * every, std::max<int64_t>(mine, 0), at(qkv),
                                    qkv.row_bytes * every, at(out), out.row_bytes * every});
        }
        group.barrier.wait(me.of);
    }
}

const char* Chain::next_weights(const Rows* tensors, size_t stage, const Member& me) const {
    for (size_t s = stage + 1; s < stages_.size(); ++s)
        if (const auto* product = std::get_if<Product>(&stages_[s].work))
            return product->panel(tensors[stages_[s].tensors[1]], me.number, me.of);
    return nullptr;
}

}  // namespace hpcdecode::ops
