#include "state_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "isa.h"

namespace hpcdecode {
namespace {

constexpr int64_t kInlineFloats = 16 << 10;     // less work than this is not worth waking threads
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
      layers_(layers, std::move(weights), o.types, table_.recur.width, o.lookahead),
      slots_(o.max_sequences, layers_.size(), nodes_.cut(o.max_sequences), o.lookahead),
      arena_(layers_.place_bytes() * o.max_sequences, "recurrent states"),
      scratch_(workers_->threads()) {
    const std::vector<int64_t> bounds = nodes_.cut(o.max_sequences);
    for (int i = 0; i < nodes_.count(); ++i)
        arena_.bind(bounds[i] * layers_.place_bytes(), (bounds[i + 1] - bounds[i]) * layers_.place_bytes(),
                    nodes_.number(i));
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
    plan_.make(slots_, layer, l.cost, slots, counts, n, workers_->threads());
    reserve_scratch(l);
    Call call{this, &l, &rows, &out, nullptr};
    run_parallel(call, plan_.node_items,
                 [](Call& c, int64_t i, int thread) { c.store->run_heads(c, c.store->plan_.find(i), thread); });
    const auto many = [](const SequenceRun& s) { return s.count > 1; };
    if (l.window_bytes > 0 && std::any_of(plan_.sequences.begin(), plan_.sequences.end(), many))
        run_parallel(call, plan_.node_sequences, [](Call& c, int64_t i, int) {
            const SequenceRun& s = c.store->plan_.sequences[i];
            if (s.count > 1) c.store->keep_inputs(c, s, 0, c.layer->window_columns);
        });
    slots_.count_run(layer, slots, counts, n);
    for (const SequenceRun& s : plan_.sequences) count_bytes(l, s);
    run_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Counts what the new tokens of a sequence move at a layer.
void StateStore::count_bytes(const RecurrentLayer& l, const SequenceRun& s) {
    const int64_t row = l.window_rows > 0 ? static_cast<int64_t>(l.window_bytes) / l.window_rows : 0;
    const int64_t before = std::max(l.shape.taps - 1, 0);
    bytes_moved_ += 2 * static_cast<int64_t>(l.state_bytes) +
                    row * (before + s.held + std::min<int64_t>(s.count, before + slots_.droppable(s.count)));
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

void StateStore::truncate(int slot, int64_t length) {
    const std::lock_guard<std::mutex> lock(mutex_);
    slots_.truncate(slot, length);
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
