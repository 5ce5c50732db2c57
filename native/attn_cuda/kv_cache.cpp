#include "kv_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

constexpr size_t kBatches = 8;  // calls whose sequences stay on the device: those of a step's lanes

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// How a type keeps K or V of a token: the bits of an element, and whether it has a scale and a middle.
struct Form {
    int bits;
    bool scale, middle;
    int row(int padded) const { return round_up(padded * bits / 8, 16); }
};
Form k_form(KvType type) {
    if (type == KvType::kI4) return {6, true, true};
    if (type == KvType::kI8 || type == KvType::kK8V4) return {8, true, false};
    return {type == KvType::kF32 ? 32 : 16, false, false};
}
Form v_form(KvType type) {
    if (type == KvType::kI4 || type == KvType::kK8V4) return {4, true, true};
    return k_form(type);
}

// Returns the largest power of two that divides `dim`, up to kMaxRotation.
int rotation_of(int dim) {
    int rotation = 1;
    while (rotation < kMaxRotation && dim % (2 * rotation) == 0) rotation *= 2;
    return rotation;
}

HeadLayout head_layout(const LayerShape& s, KvType type, int block_tokens) {
    const Form k = k_form(type), v = v_form(type);
    HeadLayout h{};
    h.k_dim = s.k_dim;
    h.v_dim = s.v_dim;
    h.k_pad = round_up(s.k_dim, 16);
    h.v_pad = round_up(s.v_dim, 16);
    h.k_rotation = k.scale ? rotation_of(s.k_dim) : 1;
    h.v_rotation = v.scale ? rotation_of(s.v_dim) : 1;
    h.block_tokens = block_tokens;
    h.k_middle = k.middle;
    h.v_middle = v.middle;
    h.k_row = k.row(h.k_pad);
    h.v_row = s.latent ? 0 : v.row(h.v_pad);
    h.v_rows = int64_t{block_tokens} * h.k_row;
    h.scales = h.v_rows + int64_t{block_tokens} * h.v_row;
    h.middles = h.scales + round_up(block_tokens * 2 * (k.scale + v.scale), 16);
    h.head_bytes = h.middles + round_up(block_tokens * 2 * (k.middle + v.middle), 16);
    h.block_bytes = h.head_bytes * s.kv_heads;
    return h;
}

// Throws std::invalid_argument for a shape without kernels.
void require(const LayerShape& s, KvType type) {
    if (s.chooses()) invalid("expected layers that attend to all tokens on a device, got one with an indexer");
    if (s.latent && type == KvType::kI8)
        invalid("kv_dtype: expected float32, float16 or bfloat16 for values in K on a device, got 'int8'");
    const int most = s.latent ? kMaxLatentVDim : kMaxVDim;
    if (s.v_dim > most)
        invalid("expected V heads of at most " + std::to_string(most) + " dims on a device, got " +
                std::to_string(s.v_dim));
}

// Returns the shared memory that a block needs at least, of `limit` bytes.
size_t smem_of(const LayerArgs& l, KvType type, size_t limit) {
    if (!l.latent) return attend_smem(l.head, type);
    size_t most = 0;
    for (const ActType act : {ActType::kF32, ActType::kBF16}) {
        const int smem = latent_form(l, type, act, limit).smem;
        most = std::max(most, static_cast<size_t>(smem));
    }
    return most;
}

Cut cut_of(const LayerArgs& l, const LatentForm& form) {
    return l.latent ? Cut{l.group, form.rows, kLatentPiece} : Cut{l.group, kRows, kPiece};
}

}  // namespace

std::vector<LayerArgs> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens) {
    check_shapes(layers, block_tokens);
    const bool latent = std::any_of(layers.begin(), layers.end(), [](const LayerShape& s) { return s.latent; });
    if (latent && (type == KvType::kK8V4 || type == KvType::kI4))
        invalid(std::string("kv_dtype: expected float32, float16, bfloat16 or int8 for values in K, got ") +
                (type == KvType::kI4 ? "int4" : "k8v4"));
    std::vector<LayerArgs> out;
    for (const LayerShape& s : layers) {
        require(s, type);
        LayerArgs l{};
        l.head = head_layout(s, type, block_tokens);
        l.heads = s.kv_heads;
        l.group = s.group();
        l.window = s.window;
        l.scale = s.scale;
        l.softcap = s.softcap;
        l.latent = s.latent;
        out.push_back(l);
    }
    return out;
}

size_t bytes_per_block(const std::vector<LayerArgs>& layers) {
    size_t total = 0;
    for (const LayerArgs& l : layers) total += l.head.block_bytes;
    return total;
}

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
      layers_(lay_out(layers, o.kv_type, o.block_tokens)),
      table_(o.block_tokens, {0, BlockTable::count_blocks(o.capacity_tokens, o.block_tokens)}, o.max_sequences),
      sinks_(layers.size()) {
    const Using device(device_);
    shared_ = shared_bytes();
    for (const LayerArgs& l : layers_) {
        const size_t smem = smem_of(l, type_, shared_);
        if (smem <= shared_) continue;
        invalid("heads of " + std::to_string(l.head.k_dim) + " and " + std::to_string(l.head.v_dim) + " dims need " +
                std::to_string(smem) + " bytes of shared memory, this device has " + std::to_string(shared_) +
                "; use a kv_dtype of fewer bits");
    }
    const int64_t blocks = table_.block_count();
    arena_ = Memory(bytes_per_block(layers_) * blocks, Memory::Kind::kDevice);
    std::vector<int64_t> at(2 * layers_.size());
    int64_t offset = 0;
    for (size_t i = 0; i < layers_.size(); ++i) {
        layers_[i].base = arena_.as<uint8_t>() + offset;
        at[i] = offset;
        at[layers_.size() + i] = layers_[i].head.block_bytes;
        offset += layers_[i].head.block_bytes * blocks;
    }
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
    if (batches_.size() < kBatches) batches_.emplace_back();
    Batch& oldest = *std::min_element(batches_.begin(), batches_.end(),
                                      [](const Batch& a, const Batch& b) { return a.turn < b.turn; });
    oldest.fill(table_, slots, counts, n, version_, cut, stream);
    oldest.turn = ++turn_;
    return oldest;
}

void KvCache::extend(const int32_t* slots, const int32_t* counts, int n, Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Using device(device_);
    const std::vector<BlockTable::Copy> copies = table_.extend(slots, counts, n);
    ++version_;
    if (copies.empty()) return;
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
                 static_cast<int>(copies.size()), static_cast<int>(layers_.size())},
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
    Batch& batch = batch_for(slots, counts, n, Cut{}, stream);
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
    enter(stream);
    const float* own = sinks ? upload(sinks_[layer], *sinks, stream) : nullptr;
    const LatentForm form = l.latent ? latent_form(l, type_, qkv.type, shared_) : LatentForm{};
    const Cut cut = cut_of(l, form);
    Batch& batch = batch_for(slots, counts, n, cut, stream);
    if (!l.latent || batch.in_pieces()) {
        const size_t partial = size_t(cut.rows) * l.heads * (2 + l.head.v_pad) * sizeof(float);
        grow_partials(batch.args().item_count * partial);
    }
    append_rows(layer, batch, qkv, shape.q_columns(), stream);
    if (l.latent) {
        attend_latents(l, form, batch, qkv, out, own, stream);
    } else {
        launch_attend({batch.args(), l, {qkv.data, qkv.type, qkv.stride}, partials_.as<float>()}, type_, stream);
        launch_merge({batch.args(), l, partials_.as<float>(), own, out.data, out.type, out.stride}, stream);
    }
    batch.used(stream);
    last_.record(stream);
    const double token_bytes = static_cast<double>(l.head.block_bytes) / l.head.block_tokens;
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
    partials_.grow(bytes, Memory::Kind::kDevice);
}

void KvCache::release(const int32_t* slots, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.release(slots, n);
    ++version_;
}

void KvCache::fork(int src, int dst) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.fork(src, dst);
    ++version_;
}

void KvCache::truncate(int slot, int64_t length) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.truncate(slot, length);
    ++version_;
}

int64_t KvCache::length(int slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return table_.length(slot);
}

void KvCache::check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.check();
}

}  // namespace hpcdecode
