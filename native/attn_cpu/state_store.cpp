#include "state_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

#include "flush.h"
#include "isa.h"

namespace hpcdecode {
namespace {

constexpr int64_t kInlineFloats = 16 << 10;     // less work than this is not worth waking threads
constexpr int64_t kInputFloats = 16 << 10;      // prepared inputs that should stay in cache
constexpr size_t kRewritten = size_t{1} << 20;  // bytes that a thread rewrites at once

}  // namespace

StateStore::StateStore(const std::vector<RecurrentShape>& layers, std::vector<RecurrentWeights> weights,
                       const StateStoreOptions& o)
    : table_(select_isa(o.isa)),
      type_(o.types.rows),
      state_type_(o.types.states),
      workers_(o.beside ? o.beside->workers() : make_workers(o.team, o.threads, o.cpus)),
      nodes_(o.beside ? o.beside->nodes() : NumaNodes(o.threads, o.cpus, o.nodes)),
      queues_(nodes_.count()),
      layers_(layers, std::move(weights), o.types, table_.recur.width),
      slots_(o.max_sequences, layers_.size(), nodes_.cut(o.max_sequences)),
      arena_(layers_.place_bytes() * o.max_sequences, "recurrent states"),
      scratch_(workers_->threads()) {
    const std::vector<int64_t> bounds = nodes_.cut(o.max_sequences);
    for (int i = 0; i < nodes_.count(); ++i)
        arena_.bind(bounds[i] * layers_.place_bytes(), (bounds[i + 1] - bounds[i]) * layers_.place_bytes(),
                    nodes_.number(i));
}

// Returns how many of `count` tokens have their inputs prepared together.
int StateStore::tokens_at_once(const RecurrentLayer& l, int heads, int64_t count) const {
    const int64_t one = table_.recur.scratch_floats(l.kernel, heads, 1);
    return static_cast<int>(std::min(count, std::clamp<int64_t>(kInputFloats / one, 1, kMaxRecurTokens)));
}

void StateStore::reserve_scratch(const RecurrentLayer& l) {
    size_t need = 0;
    for (const RunGroup& g : plan_.groups) {
        const int64_t count = plan_.sequences[g.first_sequence].count;
        const int tokens = tokens_at_once(l, g.heads_per_part, count);
        need = std::max<size_t>(need, table_.recur.scratch_floats(l.kernel, g.heads_per_part, tokens));
    }
    grow_scratch(need);
}

void StateStore::grow_scratch(size_t floats) {
    if (floats <= scratch_size_) return;
    const size_t need = (floats + 15) / 16 * 16;
    scratch_size_ = 0;
    for (auto& each : scratch_) {
        each.reset();
        each.reset(static_cast<float*>(std::aligned_alloc(64, need * sizeof(float))));
        if (!each) throw std::bad_alloc();
    }
    scratch_size_ = need;
}

// Runs `work` on the items. bounds: First item of every node, and the number of items.
void StateStore::run_parallel(Call& call, const std::vector<int64_t>& bounds, void (*work)(Call&, int64_t, int)) {
    call.work = work;
    queues_.fill(bounds);
    const auto loop = [](void* context, int thread) {
        Call& c = *static_cast<Call*>(context);
        const int node = c.store->nodes_.of_thread(thread);
        for (int64_t i; (i = c.store->queues_.take(node)) >= 0;) c.work(c, i, thread);
    };
    if (bounds.back() > 1 && plan_.work > kInlineFloats) {
        workers_->run(loop, &call);
    } else {
        loop(&call, 0);
    }
}

void StateStore::run_heads(const Call& call, const RecurItem& part, int thread) {
    const SequenceRun& s = *part.sequence;
    const RecurrentLayer& l = *call.layer;
    uint8_t* place = place_of(s.slot);
    RecurArgs a{};
    a.layer = &l.kernel;
    a.first_head = part.first_head;
    a.last_head = part.first_head + part.heads;
    a.rows = at(*call.rows, s.first_token, 0);
    a.out = const_cast<uint8_t*>(at(*call.out, s.first_token, 0));
    a.type = type_;
    a.state_type = state_type_;
    a.stride = call.rows->stride;
    a.out_stride = call.out->stride;
    a.position = slots_.length(s.slot) - s.count;
    a.count = s.count;
    a.window = place + l.window;
    a.state = place + l.state;
    a.scratch = scratch_[thread].get();
    a.tokens = tokens_at_once(l, part.heads, s.count);
    const FlushDenormals flush;
    table_.recur.run(a);
    // A single token takes the place of an input that no item needs. Inputs of more wait until all items have run.
    if (s.count == 1) keep_inputs_of(call, s, a.first_head, a.last_head);
}

// Keeps the inputs of some heads, and of the k heads that begin among them.
void StateStore::keep_inputs_of(const Call& call, const SequenceRun& s, int first_head, int last_head) const {
    const RecurrentShape& shape = call.layer->shape;
    const int first_k = (first_head + shape.group() - 1) / shape.group(), last_k = (last_head - 1) / shape.group();
    const int64_t k = int64_t{first_k} * shape.k_dim, k_count = int64_t{last_k + 1 - first_k} * shape.k_dim;
    if (k_count > 0) {
        keep_inputs(call, s, k, k_count);
        keep_inputs(call, s, shape.k_columns() + k, k_count);
    }
    keep_inputs(call, s, 2 * shape.k_columns() + int64_t{first_head} * shape.v_dim,
                int64_t{last_head - first_head} * shape.v_dim);
}

// Copies channels of the last tokens into the window of the convolution.
void StateStore::keep_inputs(const Call& call, const SequenceRun& s, int64_t channel, int64_t channels) const {
    const RecurrentLayer& l = *call.layer;
    if (l.window_bytes == 0) return;
    const int64_t length = slots_.length(s.slot), size = type_ == ActType::kF32 ? 4 : 2;
    uint8_t* window = place_of(s.slot) + l.window;
    for (int64_t i = std::max<int64_t>(0, s.count - (l.shape.taps - 1)); i < s.count; ++i) {
        const int64_t row = (length - s.count + i) % l.shape.taps;
        std::memcpy(window + (row * l.shape.channels() + channel) * size, at(*call.rows, s.first_token + i, channel),
                    channels * size);
    }
}

void StateStore::run(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& rows,
                     const Matrix& out) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    check_layer(layer, layers_.size());
    const RecurrentLayer& l = layers_[layer];
    const int64_t tokens = slots_.check_run(layer, slots, counts, n);
    check_size("rows", rows, tokens, l.shape.row_columns(type_));
    check_size("out", out, tokens, l.shape.out_columns());
    if (rows.type != type_ || out.type != type_)
        throw std::invalid_argument(std::string("rows and out: expected ") +
                                    (type_ == ActType::kF32 ? "float32" : "bfloat16"));
    plan_.make(slots_, l.cost, slots, counts, n, workers_->threads());
    reserve_scratch(l);
    Call call{this, &l, &rows, &out, nullptr};
    run_parallel(call, plan_.node_items,
                 [](Call& c, int64_t i, int thread) { c.store->run_heads(c, c.store->plan_.find(i), thread); });
    const auto many = [](const SequenceRun& s) { return s.count > 1; };
    if (l.window_bytes > 0 && std::any_of(plan_.sequences.begin(), plan_.sequences.end(), many))
        run_parallel(call, plan_.node_sequences, [](Call& c, int64_t i, int) {
            const SequenceRun& s = c.store->plan_.sequences[i];
            if (s.count > 1) c.store->keep_inputs(c, s, 0, c.layer->shape.channels());
        });
    slots_.count_run(layer, slots, counts, n);
    for (const SequenceRun& s : plan_.sequences) count_bytes(l, s.count);
    run_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Counts what a sequence with so many new tokens moves at a layer.
void StateStore::count_bytes(const RecurrentLayer& l, int64_t tokens) {
    const int64_t input = l.shape.taps > 1 ? static_cast<int64_t>(l.window_bytes) / l.shape.taps : 0;
    bytes_moved_ += 2 * static_cast<int64_t>(l.state_bytes) +
                    input * (l.shape.taps - 1 + std::min<int64_t>(tokens, l.shape.taps - 1));
}

// Lets all threads work on the memory of slots, `unit` bytes at a time.
void StateStore::over_memory(std::vector<int> slots, size_t unit, const Work& work) {
    if (slots.empty()) return;
    std::sort(slots.begin(), slots.end(), [&](int a, int b) { return slots_.place(a) < slots_.place(b); });
    struct Job {
        StateStore& store;
        const std::vector<int>& slots;
        const Work& work;
        size_t unit;
        int64_t of_slot;
    } job{*this, slots, work, unit, static_cast<int64_t>((state_bytes() + unit - 1) / unit)};
    std::vector<int64_t> bounds(nodes_.count() + 1, 0);
    for (int slot : slots) bounds[slots_.home(slot) + 1] += job.of_slot;
    for (int i = 0; i < nodes_.count(); ++i) bounds[i + 1] += bounds[i];
    queues_.fill(bounds);
    const auto loop = [](void* context, int thread) {
        const Job& j = *static_cast<Job*>(context);
        const int node = j.store.nodes_.of_thread(thread);
        for (int64_t i; (i = j.store.queues_.take(node)) >= 0;) {
            const size_t first = i % j.of_slot * j.unit, bytes = j.store.state_bytes();
            j.work(j.store.slots_.place(j.slots[i / j.of_slot]) * bytes + first, std::min(j.unit, bytes - first));
        }
    };
    workers_->run(loop, &job);
}

void StateStore::populate(const std::vector<int>& slots) {
    over_memory(slots, kHugePage, [this](size_t offset, size_t bytes) { arena_.populate(offset, bytes); });
}

void StateStore::extend(const int32_t* slots, const int32_t* counts, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    populate(slots_.extend(slots, counts, n));
}

void StateStore::release(const int32_t* slots, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t place : slots_.release(slots, n)) arena_.discard(place * state_bytes(), state_bytes());
}

void StateStore::fork(int src, int dst) {
    const std::lock_guard<std::mutex> lock(mutex_);
    slots_.fork(src, dst);
    populate({dst});
    const uint8_t *from = place_of(src), *to = place_of(dst);
    over_memory({dst}, kHugePage, [&](size_t offset, size_t bytes) {
        uint8_t* part = arena_.data() + offset;
        std::memcpy(part, from + (part - to), bytes);
    });
}

int64_t StateStore::length(int slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return slots_.length(slot);
}

int StateStore::open_slots() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return slots_.open_slots();
}

void StateStore::check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    slots_.check();
}

double StateStore::rewrite_seconds() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> open;
    for (int slot = 0; slot < slots_.max_sequences(); ++slot)
        if (slots_.is_open(slot)) open.push_back(slot);
    const auto start = std::chrono::steady_clock::now();
    over_memory(open, kRewritten,
                [this](size_t offset, size_t bytes) { table_.rewrite(arena_.data() + offset, bytes, 1.0f); });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hpcdecode
