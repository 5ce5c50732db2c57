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
constexpr int64_t kAlign = 64;

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

int64_t part(int64_t count, int member, int members) { return count * member / members; }

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
    int64_t blocks = 0;
};

Chain::Chain(std::vector<Stage> stages, int given, std::vector<Passed> passed)
    : stages_(std::move(stages)), given_(given), passed_(std::move(passed)) {
    const int tensors = given_ + static_cast<int>(passed_.size());
    for (const Stage& stage : stages_) {
        const auto* program = std::get_if<Program>(&stage.work);
        const size_t needed = program != nullptr ? program->tensors() : 3;
        const auto known = [&](int i) { return i >= 0 && i < tensors; };
        if (stage.tensors.size() != needed || !std::all_of(stage.tensors.begin(), stage.tensors.end(), known)) {
            throw std::invalid_argument("chain: expected " + std::to_string(needed) + " tensors of " +
                                        std::to_string(tensors) + " for every stage");
        }
        multiplies_ = multiplies_ || program == nullptr;
    }
    for (const Passed& p : passed_) passed_bytes_ = std::max(passed_bytes_, p.at + p.bytes);
}

int Chain::groups(int64_t tokens, int threads) const {
    const int64_t least = multiplies_ ? kLeastProducts : kLeastPrograms;
    return static_cast<int>(std::clamp<int64_t>(tokens / least, 1, threads));
}

void Chain::run(int64_t tokens, int threads, const std::vector<Rows>& given) const {
    const int useful = multiplies_ ? threads : groups(tokens, threads), most = groups(tokens, threads);
    static thread_local std::vector<char> memory;
    const int64_t of_a_group = std::min(tokens, kBlock) * passed_bytes_ + kAlign;
    if (static_cast<int64_t>(memory.size()) < most * of_a_group + kAlign) memory.resize(most * of_a_group + kAlign);
    auto* aligned = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kAlign - 1));
    const auto held = std::make_unique<Group[]>(most);
    for (int g = 0; g < most; ++g) held[g].memory = aligned + g * (of_a_group & -kAlign);
    std::atomic<int64_t> next{0};

    struct Work {
        const Chain* chain;
        Call call;
    } work{this, {given.data(), tokens, held.get(), &next}};
    const auto enter = [](void* data, int thread, int threads) {
        const Work& w = *static_cast<const Work*>(data);
        w.chain->join_group(w.call, thread, threads);
    };
    run_team(threads, useful, enter, &work);
}

void Chain::join_group(Call call, int thread, int threads) const {
    const int count = groups(call.tokens, threads);
    int group = 0;
    while (part(threads, group + 1, count) <= thread) ++group;
    const int64_t first = part(threads, group, count), end = part(threads, group + 1, count);
    const int64_t rounds = (call.tokens + count * kBlock - 1) / (count * kBlock);
    call.blocks = multiplies_ ? count * rounds : count;
    take_blocks(call, call.groups[group], static_cast<int>(thread - first), static_cast<int>(end - first));
}

void Chain::take_blocks(const Call& call, Group& group, int member, int members) const {
    while (true) {
        if (member == 0) group.block = call.next->fetch_add(1);
        group.barrier.wait(members);
        const int64_t block = group.block;
        if (block >= call.blocks) return;
        run_block(call, group, block, member, members);
    }
}

void Chain::run_block(const Call& call, Group& group, int64_t block, int member, int members) const {
    const int64_t first = part(call.tokens, block, call.blocks), end = part(call.tokens, block + 1, call.blocks);
    std::vector<Rows> all(call.given, call.given + given_), own;
    for (const Passed& p : passed_) all.push_back({group.memory + p.at * (end - first) - first * p.bytes, p.bytes});
    for (size_t s = 0; s < stages_.size(); ++s) {
        const Stage& stage = stages_[s];
        own.clear();
        for (int i : stage.tensors) own.push_back(all[i]);
        if (const auto* program = std::get_if<Program>(&stage.work)) {
            const int64_t from = first + part(end - first, member, members);
            program->run(from, first + part(end - first, member + 1, members), own.data());
        } else {
            const char* next = next_weights(all.data(), s, member, members);
            std::get<Product>(stage.work).run(first, end, own[0], own[1], own[2], member, members, next);
        }
        group.barrier.wait(members);
    }
}

const char* Chain::next_weights(const Rows* tensors, size_t stage, int member, int members) const {
    for (size_t s = stage + 1; s < stages_.size(); ++s)
        if (const auto* product = std::get_if<Product>(&stages_[s].work))
            return product->panel(tensors[stages_[s].tensors[1]], member, members);
    return nullptr;
}

}  // namespace hpcdecode::ops
