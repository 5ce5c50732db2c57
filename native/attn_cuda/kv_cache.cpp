#include "kv_cache.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace hpcdecode {
namespace {

constexpr ActType kActs[] = {ActType::kF32, ActType::kBF16};

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

// Returns the shared memory that a block needs at least, of `limit` bytes.
size_t smem_of(const LayerArgs& l, KvType type, size_t limit) {
    size_t most = 0;
    for (const ActType act : kActs) {
        const int smem = l.latent ? latent_form(l, type, act, limit).smem : attend_form(l.head, type, act, limit).smem;
        most = std::max(most, static_cast<size_t>(smem));
    }
    return most;
}

// Returns the bounds of ranges of blocks; without frames there is one.
std::vector<int64_t> bounds_of(int32_t blocks, int range_blocks) {
    return range_blocks > 0 ? PlacedPages::bounds(blocks, range_blocks) : std::vector<int64_t>{0, blocks};
}

Cut cut_of(const LayerArgs& l, const LatentForm& form, int layers = 0) {
    return l.latent ? Cut{l.group, form.rows, kLatentPiece, layers} : Cut{l.group, kRows, kPiece, layers};
}

LayerGroups groups_of(const std::vector<LayerShape>& shapes, const std::vector<LayerArgs>& layers,
                      const KvCacheOptions& o) {
    if (!o.windowed) return all_together(layers.size());
    if (o.frames.range_blocks > 0) invalid("windowed: expected a KV cache without frames");
    LayerGroups groups = group_layers(shapes, layers);
    return groups.dropping() ? groups : all_together(layers.size());
}

// Returns the bytes of the partial results of an item, for all KV heads.
size_t partial_bytes(const LayerArgs& l, const Cut& cut) {
    return size_t(cut.rows) * l.heads * (2 + l.head.v_pad) * sizeof(float);
}

// Returns the bytes of partial results of a step in which all of `sequences` decode a token over `tokens` in all.
size_t decode_partials(const LayerArgs& l, KvType type, size_t limit, int64_t tokens, int sequences) {
    size_t most = 0;
    for (const ActType act : kActs) {
        const Cut cut = cut_of(l, l.latent ? latent_form(l, type, act, limit) : LatentForm{});
        const int64_t row_blocks = (l.group + cut.rows - 1) / cut.rows, items = tokens / cut.piece + sequences;
        most = std::max(most, static_cast<size_t>(items * row_blocks) * partial_bytes(l, cut));
    }
    return most;
}

// Memory of a device is full. It says of what.
class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
    const char* what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

Memory allocate(size_t bytes, const std::string& use) {
    try {
        return Memory(bytes, Memory::Kind::kDevice);
    } catch (const std::bad_alloc&) {
        throw OutOfMemory("the device has no room for " + std::to_string(bytes) + " bytes of " + use);
    }
}

}  // namespace

bool serves(const std::vector<LayerShape>& layers, KvType type, int device) {
    try {
        const Using used(device);
        const size_t limit = shared_bytes();
        for (const LayerArgs& l : lay_out(layers, type, kDefaultBlockTokens))
            if (smem_of(l, type, limit) > limit) return false;
    } catch (const std::invalid_argument&) {
        return false;
    }
    return true;
}

KvCache::KvCache(const std::vector<LayerShape>& layers, const KvCacheOptions& o)
    : shapes_(layers),
      type_(o.kv_type),
      device_(o.device),
      most_batches_(std::max(o.batches, 1)),
      layers_(lay_out(layers, o.kv_type, o.block_tokens)),
      groups_(groups_of(layers, layers_, o)),
      table_(o.block_tokens,
             bounds_of(BlockTable::count_blocks(o.capacity_tokens, o.block_tokens, groups_.windows.size()),
                       o.frames.range_blocks),
             o.max_sequences, o.frames.range_blocks > 0, groups_.windows, o.lookahead),
      placed_(o.frames, table_.nodes()),
      sinks_(layers.size()) {
    const Using device(device_);
    shared_ = shared_bytes();
    most_batches_ *= groups_.windows.size();
    for (const LayerArgs& l : layers_) own_bytes_.push_back(l.head.block_bytes);
    for (const LayerArgs& l : layers_) {
        const size_t smem = smem_of(l, type_, shared_);
        if (smem <= shared_) continue;
        invalid("heads of " + std::to_string(l.head.k_dim) + " and " + std::to_string(l.head.v_dim) + " dims need " +
                std::to_string(smem) + " bytes of shared memory, this device has " + std::to_string(shared_) +
                "; use a kv_dtype of fewer bits");
    }
    arena_ = allocate(place_layers(), "KV cache");
    size_t partials = 0;
    for (const LayerArgs& l : layers_)
        partials = std::max(partials, decode_partials(l, type_, shared_, table_.capacity_tokens(), o.max_sequences));
    partials_ = allocate(partials, "partial results of attention");
    int64_t offset = 0;
    for (size_t i = 0; i < layers_.size(); ++i) {
        layers_[i].base = arena_.as<uint8_t>() + (groups_.dropping() ? groups_.offsets[i] : offset);
        if (!placed_.framed()) offset += own_bytes_[i] * table_.block_count();
    }
    const std::vector<Strip> parts = strips();
    std::vector<int64_t> at;
    for (const Strip& s : parts) at.push_back(s.base - arena_.as<uint8_t>());
    for (const Strip& s : parts) at.push_back(s.block_bytes);
    const size_t bytes = at.size() * sizeof(int64_t);
    Memory pinned(bytes, Memory::Kind::kPinned);
    layer_table_ = Memory(bytes, Memory::Kind::kDevice);
    std::memcpy(pinned.as<void>(), at.data(), bytes);
    copy_in(layer_table_.as<void>(), pinned.as<void>(), bytes, nullptr);
    last_.record(nullptr);
    last_.reach();
}

KvCache::~KvCache() {
    try {
        const Using device(device_);
        last_.reach();
    } catch (const std::runtime_error&) {  // the device has failed before
    }
}

void KvCache::enter(Stream stream) {
    if (stream != stream_) last_.before(stream);
    stream_ = stream;
}

// Returns the batch on the device; the least recently used one makes room.
Batch& KvCache::batch_for(const int32_t* slots, const int32_t* counts, int n, const Cut& cut, Stream stream) {
    for (Batch& b : batches_) {
        if (!b.holds(slots, counts, n, version_, cut)) continue;
        b.turn = ++turn_;
        return b;
    }
    if (batches_.size() < most_batches_) batches_.emplace_back();
    Batch& oldest = *std::min_element(batches_.begin(), batches_.end(),
                                      [](const Batch& a, const Batch& b) { return a.turn < b.turn; });
    oldest.fill(table_, placed_, slots, counts, n, version_, cut, stream);
    oldest.turn = ++turn_;
    return oldest;
}

void KvCache::extend(const int32_t* slots, const int32_t* counts, int n, Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Using device(device_);
    const std::vector<BlockTable::Copy> copies = table_.extend(slots, counts, n);
    ++version_;
    if (placed_.framed()) left_copies_.insert(left_copies_.end(), copies.begin(), copies.end());
    if (placed_.framed() || copies.empty()) return;
    const size_t bytes = copies.size() * 2 * sizeof(int32_t);
    copied_.reach();
    copies_pinned_.grow(bytes, Memory::Kind::kPinned);
    copies_.grow(bytes, Memory::Kind::kDevice);
    int32_t* pairs = copies_pinned_.as<int32_t>();
    for (const BlockTable::Copy& c : copies) {
        *pairs++ = c.first;
        *pairs++ = c.second;
    }
    enter(stream);
    copy_in(copies_.as<void>(), copies_pinned_.as<void>(), bytes, stream);
    launch_copy({arena_.as<uint8_t>(), layer_table_.as<int64_t>(), copies_.as<int32_t>(),
                 static_cast<int>(copies.size()), static_cast<int>(strips().size())},
                stream);
    copied_.record(stream);
    last_.record(stream);
}

void KvCache::append_rows(int layer, const Batch& batch, const Matrix& rows, int64_t first_column, Stream stream) {
    launch_append({batch.args(), layers_[layer], {at(rows, 0, first_column), rows.type, rows.stride}}, type_, stream);
}

void KvCache::append(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& kv, Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Using device(device_);
    check_layer(layer, layers_.size());
    check_append(shapes_[layer], table_.check_written(slots, counts, n), kv);
    enter(stream);
    Batch& batch = batch_for(slots, counts, n, Cut{0, 0, 0, groups_.group[layer]}, stream);
    append_rows(layer, batch, kv, 0, stream);
    batch.used(stream);
    last_.record(stream);
}

const float* KvCache::upload(Sinks& sinks, const std::vector<float>& values, Stream stream) {
    if (sinks.values == values) return sinks.memory.as<float>();
    const size_t bytes = values.size() * sizeof(float);
    Memory pinned(bytes, Memory::Kind::kPinned);
    last_.reach();
    sinks.memory.grow(bytes, Memory::Kind::kDevice);
    std::memcpy(pinned.as<void>(), values.data(), bytes);
    copy_in(sinks.memory.as<void>(), pinned.as<void>(), bytes, stream);
    last_.record(stream);
    last_.reach();
    sinks.values = values;
    return sinks.memory.as<float>();
}

void KvCache::attend(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& qkv,
                     const Matrix& out, const std::vector<float>* sinks, Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Using device(device_);
    check_layer(layer, layers_.size());
    const LayerShape& shape = shapes_[layer];
    const LayerArgs& l = layers_[layer];
    check_attend(shape, table_.check_written(slots, counts, n), qkv, out, sinks ? sinks->data() : nullptr,
                 sinks ? static_cast<int64_t>(sinks->size()) : 0);
    table_.check_seen(groups_.group[layer], slots, counts, n);
    enter(stream);
    const float* own = sinks ? upload(sinks_[layer], *sinks, stream) : nullptr;
    const LatentForm form = l.latent ? latent_form(l, type_, qkv.type, shared_) : LatentForm{};
    const Cut cut = cut_of(l, form, groups_.group[layer]);
    Batch& batch = batch_for(slots, counts, n, cut, stream);
    if (!l.latent || batch.in_pieces()) {
        grow_partials(batch.args().item_count * partial_bytes(l, cut));
    }
    append_rows(layer, batch, qkv, shape.q_columns(), stream);
    if (l.latent) {
        attend_latents(l, form, batch, qkv, out, own, stream);
    } else {
        const AttendForm form = attend_form(l.head, type_, qkv.type, shared_);
        launch_attend({batch.args(), l, form, {qkv.data, qkv.type, qkv.stride}, partials_.as<float>()}, type_, stream);
        launch_merge({batch.args(), l, partials_.as<float>(), own, out.data, out.type, out.stride}, stream);
    }
    batch.used(stream);
    last_.record(stream);
    const double token_bytes = static_cast<double>(own_bytes_[layer]) / l.head.block_tokens;
    bytes_read_ += static_cast<int64_t>(batch.bytes(l, token_bytes));
}

void KvCache::attend_latents(const LayerArgs& layer, const LatentForm& form, const Batch& batch, const Matrix& qkv,
                             const Matrix& out, const float* sinks, Stream stream) {
    const LatentArgs args{
        batch.args(), layer,    form,      {qkv.data, qkv.type, qkv.stride}, sinks, partials_.as<float>(),
        out.data,     out.type, out.stride};
    launch_latent(args, type_, stream);
    if (batch.in_pieces()) launch_latent_merge(args, stream);
}

void KvCache::grow_partials(size_t bytes) {
    if (bytes <= partials_.size()) return;
    last_.reach();
    partials_ = Memory();
    partials_ = allocate(bytes, "partial results of attention: fewer new tokens a call need less");
}

}  // namespace hpcdecode
