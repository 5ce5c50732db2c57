#include "kv_cache.h"

#include <cstdlib>
#include <new>

#include "bandwidth.h"
#include "call.h"
#include "isa.h"
#include "row_args.h"

namespace hpcdecode {
namespace {

constexpr int64_t kInlineBytes = 64 << 10;  // less work than this is not worth waking threads

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Returns the bytes that AttendItem::carve_scratch takes, enough for merging and appending, too.
size_t scratch_bytes(const HeadLayout& l, int64_t rows, int bias_dim) {
    const size_t r = static_cast<size_t>(rows), f = sizeof(float);
    return padded(r * l.k_pad * f) + 3 * padded(r * f) + 2 * padded(r * kTile * f) + padded(r * l.v_pad * f) +
           padded(r * (2 + l.v_pad) * f) + 3 * padded(kMaxPassRows * kChunk * f) + padded(l.run_bytes) +
           padded(kMaxPassRows * l.k_dim * f) + padded((l.k_pad + l.v_pad) * f) + padded(l.made_bytes) +
           padded(r * bias_dim * f);
}

}  // namespace

KvCache::KvCache(const std::vector<LayerShape>& layers, const KvCacheOptions& o)
    : table_(select_isa(o.isa)),
      workers_(make_workers(o.team, o.threads, o.cpus)),
      nodes_(o.threads, o.cpus, o.nodes),
      queues_(nodes_.count()),
      pool_(layers, o.kv_type, o.capacity_tokens, o.max_sequences, o.block_tokens, nodes_, o.frames, o.windowed,
            o.lookahead),
      choices_(o.max_sequences),
      of_tokens_(o.threads),
      rooms_(o.threads),
      scratch_(o.threads),
      scratch_size_(o.threads, 0),
      clock_(o.threads) {}

void KvCache::grow(Buffer& buffer, size_t& size, size_t need) {
    if (need <= size) return;
    need = padded(need);
    buffer.reset();
    size = 0;
    buffer.reset(static_cast<uint8_t*>(std::aligned_alloc(64, need)));
    if (!buffer) throw std::bad_alloc();
    size = need;
}

void KvCache::reserve_scratch(const LayerLayout& layer, int64_t rows) {
    const size_t need = std::max(scratch_bytes(layer.head, rows, layer.shape.bias.dim), index_scratch_bytes(layer));
    for (size_t i = 0; i < scratch_.size(); ++i) grow(scratch_[i], scratch_size_[i], need);
}

// Runs `work` on the items. bounds: First item of every node, and the number of items.
void KvCache::run_parallel(Call& call, const std::vector<int64_t>& bounds, void (*work)(Call&, int64_t, int)) {
    call.work = work;
    queues_.fill(bounds);
    const auto loop = [](void* context, int thread) {
        Call& c = *static_cast<Call*>(context);
        const int node = c.cache->nodes_.of_thread(thread);
        const double start = seconds_now();
        for (int64_t i; (i = c.cache->queues_.take(node)) >= 0;) c.work(c, i, thread);
        c.cache->clock_.add(thread, seconds_now() - start);
    };
    if (bounds.back() > 1 && call.plan->bytes > kInlineBytes) {
        workers_->run(loop, &call);
    } else {
        loop(&call, 0);
    }
}

// Returns the arguments that write new tokens at positions [begin, end) of one head.
AppendArgs KvCache::new_rows(const Call& call, const SequencePlan& s, int head, int64_t begin, int64_t end) const {
    const LayerShape& shape = call.layout->shape;
    const int64_t row = s.first_token + begin - (s.length - s.count);
    AppendArgs a{};
    a.kv = pool_.view(call.layer, head, s.slot);
    a.k = at(*call.in, row, call.k_column + int64_t{head} * shape.k_dim);
    a.v = shape.latent ? a.k : at(*call.in, row, call.k_column + shape.v_column() + int64_t{head} * shape.v_dim);
    a.type = call.in->type;
    a.stride = call.in->stride;
    a.position = begin;
    a.count = end - begin;
    return a;
}

void KvCache::write_rows(const Call& call, const SequencePlan& s, int head) {
    if (call.layout->entries > 0) return write_entries(call, s);
    const AppendArgs own = new_rows(call, s, head, pool_.first_written(call.layer, s.slot, s.count), s.length);
    table_.append[static_cast<int>(pool_.type())](own);
    if (head > 0 || !call.layout->shape.has_indexer()) return;
    if (call.layout->shape.has_pools()) return write_index_keys(call, s, call.layout->shape.index_pool);
    AppendArgs keys = own;
    keys.kv = pool_.index_view(call.layer, s.slot);
    keys.k = keys.v = at(*call.in, s.first_token, call.k_column + call.layout->shape.index_k_column());
    table_.append[static_cast<int>(index_type(pool_.type()))](keys);
}

// Writes the new tokens of all sequences; before an attention, only of those whose items do not write them.
void KvCache::write_all(Call& call) {
    std::vector<int64_t> bounds = plan_.node_sequences;
    for (int64_t& b : bounds) b *= call.layout->shape.kv_heads;
    run_parallel(call, bounds, [](Call& c, int64_t i, int) {
        const int heads = c.layout->shape.kv_heads;
        const SequencePlan& s = c.plan->sequences[i / heads];
        if (c.out == nullptr || s.write_first) c.cache->write_rows(c, s, static_cast<int>(i % heads));
    });
}

void KvCache::run_item(const Call& call, int64_t item, int thread) {
    const SequencePlan& s = call.plan->find(item);
    const LayerShape& shape = call.layout->shape;
    int64_t i = item - s.first_item;
    const int segment = static_cast<int>(i % s.segments);
    i /= s.segments;
    const int row_block = static_cast<int>(i % s.row_blocks),
              first_head = static_cast<int>(i / s.row_blocks) * s.heads_per_item;
    const int64_t rows = s.count * shape.group();
    AttendArgs a{};
    a.type = call.in->type;
    a.q_stride = call.in->stride;
    a.first_row = row_block * kMaxRowBlock;
    a.rows = static_cast<int>(std::min<int64_t>(kMaxRowBlock, rows - a.first_row));
    a.group = shape.group();
    a.length = s.length;
    if (s.chosen != nullptr) a.chosen = s.chosen + first_head * s.chosen_of_head;
    a.new_tokens = s.count;
    if (s.chosen == nullptr) a.window = shape.window;
    a.scale = shape.scale;
    a.softcap = shape.softcap;
    a.piece_begin = s.piece_begin + segment * s.segment_pieces;
    a.piece_end = std::min(a.piece_begin + s.segment_pieces, s.piece_begin + s.pieces);
    a.fold = segment == 0;
    a.out_stride = call.out->stride;
    a.scratch = scratch_[thread].get();
    a.heads = std::min(s.heads_per_item, shape.kv_heads - first_head);
    if (!s.write_first && !s.written) {
        const int64_t end = std::min(s.length, a.piece_end * kPiece);
        const int64_t begin = std::max(s.length - s.count, a.piece_begin * kPiece);
        if (begin < end) a.fresh = new_rows(call, s, first_head, begin, end);
    }
    const int64_t q_head = int64_t{first_head} * shape.group();
    a.kv = pool_.view(call.layer, first_head, s.slot);
    a.q = at(*call.in, s.first_token, q_head * shape.k_dim);
    a.out = const_cast<uint8_t*>(at(*call.out, s.first_token, q_head * shape.v_dim));
    a.bias = bias_args(shape, *call.in, s.first_token, q_head);
    a.sinks = sink_args(shape, call.sinks, *call.in, s.first_token, q_head);
    if (s.segments > 1) {
        const int64_t of_head = rows * (2 + call.layout->head.v_pad);
        const int64_t piece = segment == 0 ? 0 : 1 + (segment - 1) * s.segment_pieces;
        a.partial_stride = shape.kv_heads * of_head;
        a.partials = reinterpret_cast<float*>(partials_.get()) + s.first_partial + piece * a.partial_stride +
                     first_head * of_head;
    }
    table_.attend[static_cast<int>(pool_.type())](a);
    if (s.segments == 1) return;
    const int run = first_head / s.heads_per_item;
    if (pending_[s.first_pending + run].fetch_sub(1) == 1) merge(call, s, first_head, a.heads, thread);
}

void KvCache::merge(const Call& call, const SequencePlan& s, int head, int heads, int thread) {
    const LayerShape& shape = call.layout->shape;
    const int64_t q_head = int64_t{head} * shape.group();
    MergeArgs m{};
    m.rows = static_cast<int>(s.count * shape.group());
    m.v_dim = shape.v_dim;
    m.v_pad = call.layout->head.v_pad;
    m.v_rotation = call.layout->head.v_rotation;
    m.group = shape.group();
    m.count = static_cast<int>(s.partials());
    m.partials =
        reinterpret_cast<const float*>(partials_.get()) + s.first_partial + int64_t{head} * m.rows * (2 + m.v_pad);
    m.partial_stride = int64_t{shape.kv_heads} * m.rows * (2 + m.v_pad);
    m.heads = heads;
    m.sinks = sink_args(shape, call.sinks, *call.in, s.first_token, q_head);
    m.out = const_cast<uint8_t*>(at(*call.out, s.first_token, q_head * shape.v_dim));
    m.type = call.out->type;
    m.out_stride = call.out->stride;
    m.scratch = scratch_[thread].get();
    table_.merge(m);
}

void KvCache::extend(const int32_t* slots, const int32_t* counts, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    populate(pool_.extend(slots, counts, n));
}

// Lets all threads touch pages, each its own. Finding a page takes long, and two threads that write to one both find
// one.
void KvCache::populate(const std::vector<size_t>& pages) {
    if (pages.empty()) return;
    struct Job {
        BlockPool& pool;
        const std::vector<size_t>& pages;
        std::atomic<size_t> next{0};
    } job{pool_, pages};
    const auto work = [](void* context, int) {
        Job& j = *static_cast<Job*>(context);
        for (size_t i; (i = j.next.fetch_add(1)) < j.pages.size();) j.pool.populate(j.pages[i]);
    };
    workers_->run(work, &job);
}

void KvCache::append(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& kv) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double start = seconds_now();
    check_layer(layer, pool_.layers().size());
    const LayerLayout& l = pool_.layers()[layer];
    check_append(l.shape, pool_.check_written(slots, counts, n), kv);
    plan_.make(pool_, layer, slots, counts, n, workers_->threads());
    pool_.find_blocks(slots, counts, n, false);
    reserve_scratch(l, 1);
    Call call{this, layer, &l, &kv, nullptr, 0, nullptr, &plan_, nullptr};
    write_all(call);
    clock_.add_call(seconds_now() - start);
}

// Plans an attention, and makes room for what its items need.
void KvCache::make_plan(int layer, const int32_t* slots, const int32_t* counts, int n) {
    plan_.make(pool_, layer, slots, counts, n, workers_->threads());
    pool_.find_blocks(slots, counts, n, true);
    reserve_items(pool_.layers()[layer]);
}

// Makes room for what the items of the plan need.
void KvCache::reserve_items(const LayerLayout& l) {
    int64_t rows = 1;
    for (const SequencePlan& s : plan_.sequences)
        rows = std::max(rows, std::min<int64_t>(s.count * l.shape.group(), kMaxRowBlock) * s.heads_per_item);
    reserve_scratch(l, rows);
    grow(partials_, partials_size_, plan_.partial_floats * sizeof(float));
    if (plan_.pending > pending_size_) {
        pending_.reset(new std::atomic<int>[plan_.pending]);
        pending_size_ = plan_.pending;
    }
    for (const SequencePlan& s : plan_.sequences)
        if (s.segments > 1)
            for (int h = 0; h < s.head_items; ++h) pending_[s.first_pending + h].store(s.segments);
}

void KvCache::attend(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& qkv,
                     const Matrix& out, const float* sinks, int64_t sink_count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double start = seconds_now();
    check_layer(layer, pool_.layers().size());
    const LayerLayout& l = pool_.layers()[layer];
    const LayerShape& shape = l.shape;
    check_attend(shape, pool_.check_written(slots, counts, n), qkv, out, sinks, sink_count);
    pool_.check_seen(l.group, slots, counts, n);
    make_plan(layer, slots, counts, n);
    Call call{this, layer, &l, &qkv, &out, shape.q_columns(), sinks, &plan_, nullptr};
    if (shape.chooses()) choose_all(call, slots, counts, n);
    if (plan_.write_first) write_all(call);
    run_parallel(call, plan_.node_items, [](Call& c, int64_t i, int thread) { c.cache->run_item(c, i, thread); });
    bytes_read_ += plan_.bytes;
    const double seconds = seconds_now() - start;
    attend_seconds_ += seconds;
    clock_.add_call(seconds);
}

void KvCache::release(const int32_t* slots, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.release(slots, n);
}

void KvCache::fork(int src, int dst) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.fork(src, dst);
}

void KvCache::truncate(int slot, int64_t length) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.truncate(slot, length);
}

int64_t KvCache::length(int slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pool_.length(slot);
}

void KvCache::check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool_.check();
}

double KvCache::read_seconds() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return hpcdecode::read_seconds(table_, *workers_, nodes_, queues_, pool_.data(), pool_.bytes());
}

}  // namespace hpcdecode
