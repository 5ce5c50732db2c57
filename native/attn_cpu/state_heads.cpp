// Heads of a sequence through the states of a layer, and what is kept of the tokens' rows.
//
// Tokens that may be dropped again go through a copy of the state. Their rows are kept; the next call, which knows
// which of them were right, takes those through the state first. So a state is still read and written once a call.
#include <algorithm>
#include <cstring>
#include <new>

#include "flush.h"
#include "state_store.h"

namespace hpcdecode {
namespace {

constexpr int64_t kInputFloats = 16 << 10;  // prepared inputs that should stay in cache

size_t floats_of(size_t bytes) { return (bytes + 63) / 64 * 16; }  // in whole cache lines

}  // namespace

// Returns how many of `count` tokens have their inputs prepared together.
int StateStore::tokens_at_once(const RecurrentLayer& l, int heads, int64_t count) const {
    const int64_t one = table_.recur.scratch_floats(l.kernel, heads, 1);
    return static_cast<int>(std::min(count, std::clamp<int64_t>(kInputFloats / one, 1, kMaxRecurTokens)));
}

// Returns where the parts of a thread's scratch begin, which has room for so many tokens of any `heads` heads.
StateStore::Scratch StateStore::scratch_of(const RecurrentLayer& l, int heads, int64_t tokens) const {
    const int n = tokens_at_once(l, heads, tokens);
    const size_t inputs = floats_of(table_.recur.scratch_floats(l.kernel, heads, n) * sizeof(float));
    if (slots_.lookahead() == 0) return {inputs, inputs, inputs};
    const size_t out = inputs + floats_of(l.shape.out_columns() * sizeof(float));
    return {inputs, out, out + floats_of(l.state_bytes)};
}

void StateStore::reserve_scratch(const RecurrentLayer& l) {
    size_t need = 0;
    for (const RunGroup& g : plan_.groups) {
        const int64_t tokens = plan_.sequences[g.first_sequence].tokens();
        need = std::max(need, scratch_of(l, g.heads_per_part, tokens).end);
    }
    grow_scratch(need);
}

void StateStore::grow_scratch(size_t floats) {
    if (floats <= scratch_size_) return;
    scratch_size_ = 0;
    for (auto& each : scratch_) {
        each.reset();
        each.reset(static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))));
        if (!each) throw std::bad_alloc();
    }
    scratch_size_ = floats;
}

RecurArgs StateStore::arguments(const Call& call, const RecurItem& part, float* scratch) const {
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
    a.end = s.count - slots_.droppable(s.count);
    a.window = place + l.window;
    a.window_rows = l.window_rows;
    a.window_stride = l.window_columns;
    a.state = place + l.state;
    a.scratch = scratch;
    a.tokens = tokens_at_once(l, part.heads, s.tokens());
    return a;
}

void StateStore::run_heads(const Call& call, const RecurItem& part, int thread) {
    const SequenceRun& s = *part.sequence;
    const RecurrentLayer& l = *call.layer;
    const RecurArgs a = arguments(call, part, scratch_[thread].get());
    const FlushDenormals flush;
    if (s.held > 0 && l.state_bytes > 0) run_held(l, a, s);
    table_.recur.run(a);
    if (a.end < s.count) run_guesses(l, a, s);
    // A single token takes the place of a row that no item needs. Rows of more wait until all items have run.
    if (s.count == 1) keep_inputs_of(call, s, a.first_head, a.last_head);
}

// Takes the held tokens before those of `call` through the state. Nobody reads what comes out.
void StateStore::run_held(const RecurrentLayer& l, const RecurArgs& call, const SequenceRun& s) const {
    const int64_t size = type_ == ActType::kF32 ? 4 : 2;
    RecurArgs a = call;
    a.stride = l.window_columns;
    a.out = call.scratch + scratch_of(l, call.last_head - call.first_head, s.tokens()).out;
    a.out_stride = 0;
    for (int64_t held = s.held; held > 0; held -= a.end) {
        a.position = call.position - held;
        const int64_t row = a.position % l.window_rows;
        a.rows = static_cast<const uint8_t*>(call.window) + row * l.window_columns * size;
        a.end = std::min(held, l.window_rows - row);
        table_.recur.run(a);
    }
}

// Takes the tokens behind those of `call` through a copy of the state.
void StateStore::run_guesses(const RecurrentLayer& l, const RecurArgs& call, const SequenceRun& s) const {
    const StatePart own = layers_.part(l, call.first_head, call.last_head);
    const size_t at = scratch_of(l, call.last_head - call.first_head, s.tokens()).state;
    const uint8_t* state = static_cast<const uint8_t*>(call.state);
    uint8_t* copy = reinterpret_cast<uint8_t*>(call.scratch + at);
    for (size_t i = 0, from = own.offset; i < static_cast<size_t>(own.pieces); ++i, from += own.stride)
        std::memcpy(copy + from, state + from, own.bytes);
    RecurArgs a = call;
    a.state = copy;
    a.first = call.end;
    a.end = s.count;
    table_.recur.run(a);
}

// Keeps the inputs of some heads, and of the k heads that begin among them.
void StateStore::keep_inputs_of(const Call& call, const SequenceRun& s, int first_head, int last_head) const {
    const RecurrentShape& shape = call.layer->shape;
    const int first_k = (first_head + shape.group() - 1) / shape.group(), last_k = (last_head - 1) / shape.group();
    const int64_t k = int64_t{first_k} * shape.k_dim, k_count = int64_t{last_k + 1 - first_k} * shape.k_dim;
    if (shape.taps < 2) return;  // the token is in the state
    if (k_count > 0) {
        keep_inputs(call, s, k, k_count);
        keep_inputs(call, s, shape.k_columns() + k, k_count);
    }
    keep_inputs(call, s, 2 * shape.k_columns() + int64_t{first_head} * shape.v_dim,
                int64_t{last_head - first_head} * shape.v_dim);
}

// Copies columns of the last tokens' rows into the window: those that may be dropped, and what a convolution reads.
void StateStore::keep_inputs(const Call& call, const SequenceRun& s, int64_t column, int64_t columns) const {
    const RecurrentLayer& l = *call.layer;
    const int64_t length = slots_.length(s.slot), size = type_ == ActType::kF32 ? 4 : 2;
    const int64_t kept = slots_.droppable(s.count) + std::max(l.shape.taps - 1, 0);
    uint8_t* window = place_of(s.slot) + l.window;
    for (int64_t i = std::max<int64_t>(0, s.count - kept); i < s.count; ++i) {
        const int64_t row = (length - s.count + i) % l.window_rows;
        std::memcpy(window + (row * l.window_columns + column) * size, at(*call.rows, s.first_token + i, column),
                    columns * size);
    }
}

}  // namespace hpcdecode
