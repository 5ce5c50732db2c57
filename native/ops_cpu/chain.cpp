#include "chain.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#include "barrier.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int64_t kLeastTokens = 4;  // of a group: waking a thread costs about as much
constexpr int64_t kLeastTiles = 2;   // of a group that multiplies: with fewer it would read weights for few tokens
constexpr int64_t kMostTiles = 8;    // of a block

// Returns how many tensors a stage has.
size_t tensors_of(const decltype(Stage::work)& work) {
    if (const auto* kernel = std::get_if<FusedKernel>(&work)) return kernel->tensors();
    if (const auto* product = std::get_if<Product>(&work)) return product->updates() ? 6 : 3;
    if (const auto* experts = std::get_if<ExpertProduct>(&work)) return experts->tensors();
    if (std::holds_alternative<AdapterProduct>(work)) return 4;
    return std::holds_alternative<AdapterSum>(work) ? 5 : 2;
}

}  // namespace

struct alignas(64) Chain::Group {
    Barrier barrier;
    int64_t block = 0;
    std::atomic<int64_t> next{0};  // of what members take of GEMMs of experts
    char* memory = nullptr;
};

struct Chain::Call {
    const Rows* given;
    int64_t tokens, block_bytes;
    Group* groups;
    std::atomic<int64_t>* next;
    RowAttention* attention;
    int64_t blocks = 0, at_once = 1;
};

struct Chain::Member {
    int thread, number, of;  // of its group's threads
};

// A block of tokens on its way through the stages.
class Chain::Block {
  public:
    Block(const Chain& chain, const Call& call, Group& group, const Member& me, int64_t number, char* memory);

    bool done() const { return stage_ == chain_.stages_.size(); }
    void run(Beside* beside);                     // runs up to the next attention, or to the end
    void attend();                                // attends if the next stage is an attention
    void pass() { stage_ += attends() ? 1 : 0; }  // passes an attention that was computed beside a GEMM
    int layer() const;
    SequenceRows sequences() const;  // sequences that this member attends to

  private:
    bool attends() const;

    const Chain& chain_;
    const Call& call_;
    Group& group_;
    const Member& me_;
    int64_t first_, step_, count_;
    std::vector<Rows> tensors_, own_;
    size_t stage_ = 0;
    int64_t taken_ = 0;  // where the group's `next` begins
};

Chain::Chain(std::vector<Stage> stages, int given, std::vector<Passed> passed)
    : stages_(std::move(stages)), given_(given), passed_(std::move(passed)) {
    const int tensors = given_ + static_cast<int>(passed_.size());
    int rows = kTileRows;
    for (const Stage& stage : stages_) {
        const auto* product = std::get_if<Product>(&stage.work);
        const bool attends = std::holds_alternative<Attention>(stage.work);
        const bool chooses = std::holds_alternative<ExpertProduct>(stage.work);
        const size_t needed = tensors_of(stage.work);
        const auto known = [&](int i) { return i >= 0 && i < tensors; };
        if (stage.tensors.size() != needed || !std::all_of(stage.tensors.begin(), stage.tensors.end(), known)) {
            throw std::invalid_argument("chain: expected " + std::to_string(needed) + " tensors of " +
                                        std::to_string(tensors) + " for every stage");
        }
        multiplies_ = multiplies_ || product != nullptr || chooses;
        chooses_ = chooses_ || chooses;
        if (product != nullptr) rows = std::max(rows, product->tile_rows());
        attends_ = attends_ || attends;
    }
    least_ = multiplies_ ? kLeastTiles * rows : kLeastTokens;
    most_ = chooses_ ? std::numeric_limits<int32_t>::max() : kMostTiles * rows;
    for (const Passed& p : passed_) passed_bytes_ = std::max(passed_bytes_, p.at + p.bytes);
}

int Chain::groups(int64_t tokens, int threads) const {
    if (chooses_) return 1;
    return static_cast<int>(std::clamp<int64_t>(tokens / least_, 1, threads));
}

// Returns whether every thread takes two blocks at a time, and attends to one while it multiplies for the other.
bool Chain::pairs(int64_t tokens, int threads) const { return attends_ && !chooses_ && tokens >= 2 * least_ * threads; }

bool Chain::together(int64_t tokens, int threads) const {
    return groups(tokens, threads) == 1 && !pairs(tokens, threads) && tokens <= most_;
}

void Chain::run(int64_t tokens, int threads, const std::vector<Rows>& given, RowAttention* attention) const {
    if (attends_ != (attention != nullptr)) throw std::invalid_argument("chain: expected attention where it has any");
    if (attends_ && attention->sequences(tokens) < tokens && !together(tokens, threads))
        throw std::invalid_argument("chain: expected one token of each sequence in a step of " +
                                    std::to_string(tokens) + " tokens, which take several blocks");
    const int most = groups(tokens, threads), useful = multiplies_ ? threads : most;
    static thread_local std::vector<char> memory;
    const int64_t of_a_block = (std::min(tokens, most_) * passed_bytes_ + kLine) & -kLine;
    const int64_t of_a_group = of_a_block * (attends_ ? 2 : 1);
    if (static_cast<int64_t>(memory.size()) < most * of_a_group + kLine) memory.resize(most * of_a_group + kLine);
    auto* aligned = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kLine - 1));
    const auto held = std::make_unique<Group[]>(most);
    for (int g = 0; g < most; ++g) held[g].memory = aligned + g * of_a_group;
    std::atomic<int64_t> next{0};

    const Call call{given.data(), tokens, of_a_block, held.get(), &next, attention};
    const auto join = [&](int thread, int threads) { join_group(call, thread, threads); };
    if (attends_) attention->begin(tokens, threads);
    run_team(threads, useful, join);
    if (attends_) attention->end();
}

void Chain::join_group(Call call, int thread, int threads) const {
    const int count = groups(call.tokens, threads);
    int group = 0;
    while (share(threads, group + 1, count) <= thread) ++group;
    const int64_t first = share(threads, group, count), end = share(threads, group + 1, count);
    call.at_once = pairs(call.tokens, threads) ? 2 : 1;
    const int64_t most = count * call.at_once * most_, rounds = call.at_once * ((call.tokens + most - 1) / most);
    call.blocks = multiplies_ || passed_bytes_ > 0 ? count * rounds : count;
    take_blocks(call, call.groups[group], {thread, static_cast<int>(thread - first), static_cast<int>(end - first)});
}

void Chain::take_blocks(const Call& call, Group& group, const Member& me) const {
    while (true) {
        if (me.number == 0) group.block = call.next->fetch_add(call.at_once);
        group.barrier.wait(me.of);
        const int64_t number = group.block;
        if (number >= call.blocks) return;
        Block block(*this, call, group, me, number, group.memory);
        if (call.at_once == 1) {
            while (!block.done()) {
                block.run(nullptr);
                block.attend();
            }
        } else {
            Block other(*this, call, group, me, number + 1, group.memory + call.block_bytes);
            run_pair(block, other, *call.attention, me.thread);
        }
    }
}

// Runs two blocks, with the attention of each beside the GEMMs of the other.
void Chain::run_pair(Block& one, Block& two, RowAttention& attention, int thread) {
    AttentionBeside beside(attention, thread);
    Block *first = &one, *second = &two;
    one.run(nullptr);
    two.run(nullptr);
    one.attend();
    for (; !first->done() || !second->done(); std::swap(first, second)) {
        if (!second->done()) beside.start(second->layer(), second->sequences());
        first->run(&beside);
        beside.finish();
        second->pass();
    }
}

Chain::Block::Block(const Chain& chain, const Call& call, Group& group, const Member& me, int64_t number, char* memory)
    : chain_(chain), call_(call), group_(group), me_(me) {
    const bool spread = chain.attends_;
    first_ = spread ? number : share(call.tokens, number, call.blocks);
    step_ = spread ? call.blocks : 1;
    count_ = spread ? (call.tokens - number + step_ - 1) / step_ : share(call.tokens, number + 1, call.blocks) - first_;
    for (int i = 0; i < chain.given_; ++i) {
        const Rows& rows = call.given[i];
        tensors_.push_back({rows.data + first_ * rows.row_bytes, step_ * rows.row_bytes});
    }
    for (const Passed& p : chain.passed_) tensors_.push_back({memory + p.at * count_ + p.inside, p.bytes});
}

bool Chain::Block::attends() const { return !done() && std::holds_alternative<Attention>(chain_.stages_[stage_].work); }

void Chain::Block::run(Beside* beside) {
    const int64_t from = share(count_, me_.number, me_.of), to = share(count_, me_.number + 1, me_.of);
    for (; !done() && !attends(); ++stage_) {
        const Stage& stage = chain_.stages_[stage_];
        own_.clear();
        for (int i : stage.tensors) own_.push_back(tensors_[i]);
        if (const auto* kernel = std::get_if<FusedKernel>(&stage.work)) {
            kernel->run(from, to, own_.data());
        } else if (const auto* low = std::get_if<AdapterProduct>(&stage.work)) {
            low->run(count_, own_[0], own_[1], own_[2], own_[3], me_.number, me_.of);
        } else if (const auto* sum = std::get_if<AdapterSum>(&stage.work)) {
            sum->run(count_, {own_[0], own_[2], own_[3]}, own_[1], own_[4], me_.number, me_.of);
        } else if (const auto* experts = std::get_if<ExpertProduct>(&stage.work)) {
            ExpertRows rows{count_, own_[1], own_[0], own_.back(), own_[3]};
            if (own_.size() == 7) rows.low = own_[4], rows.b = own_[5];
            taken_ = experts->run(rows, own_[2].data, me_.number, me_.of, group_.next, taken_);
        } else {
            const auto& product = std::get<Product>(stage.work);
            const char* next = chain_.next_weights(tensors_.data(), stage_, me_);
            if (product.updates()) {
                const Update update{own_[2], own_[3], own_[4]};
                const Panels mine = product.own(me_.number, me_.of);
                product.run_updated(count_, own_[0], own_[1], own_[5], update, mine, next, beside);
            } else {
                product.run(count_, own_[0], own_[1], own_[2], me_.number, me_.of, next, beside);
            }
        }
        group_.barrier.wait(me_.of);
    }
}

int Chain::Block::layer() const { return std::get<Attention>(chain_.stages_[stage_].work).layer; }

SequenceRows Chain::Block::sequences() const {
    const Stage& stage = chain_.stages_[stage_];
    const Rows &qkv = tensors_[stage.tensors[0]], &out = tensors_[stage.tensors[1]];
    const int64_t every = me_.of, sequences = call_.attention->sequences(call_.tokens);
    const auto mine = [&](int64_t of) { return std::max<int64_t>((of - me_.number + every - 1) / every, 0); };
    if (sequences < call_.tokens) {  // this is the only block
        return {me_.number,      every,
                mine(sequences), reinterpret_cast<uint8_t*>(qkv.data),
                qkv.row_bytes,   reinterpret_cast<uint8_t*>(out.data),
                out.row_bytes};
    }
    const auto at = [&](const Rows& r) { return reinterpret_cast<uint8_t*>(r.data + me_.number * r.row_bytes); };
    return {first_ + me_.number * step_, step_ * every, mine(count_),         at(qkv),
            qkv.row_bytes * every,       at(out),       out.row_bytes * every};
}

void Chain::Block::attend() {
    if (!attends()) return;
    call_.attention->attend(layer(), me_.thread, sequences());
    group_.barrier.wait(me_.of);
    ++stage_;
}

const char* Chain::next_weights(const Rows* tensors, size_t stage, const Member& me) const {
    for (size_t s = stage + 1; s < stages_.size(); ++s)
        if (const auto* product = std::get_if<Product>(&stages_[s].work))
            return product->panel(tensors[stages_[s].tensors[1]], me.number, me.of);
    return nullptr;
}

}  // namespace hpcdecode::ops
