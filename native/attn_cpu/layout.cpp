#include "layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

size_t round_up(size_t x, size_t unit) { return (x + unit - 1) / unit * unit; }

// How a type keeps K or V of a token.
struct Form {
    int bits;    // of an element
    int unit;    // elements: rows are padded to multiples of it
    int scales;  // bfloat16
};
struct Forms {
    Form k, v;
};

Forms forms_of(KvType type) {
    switch (type) {
        case KvType::kF32:
            return {{32, 2, 0}, {32, kTile, 0}};
        case KvType::kI8:
            return {{8, 8, 1}, {8, kTile, 1}};
        case KvType::kK8V4:
            return {{8, 8, 1}, {4, kTile, 2}};
        case KvType::kI4:
            return {{6, 16, 2}, {4, kTile, 2}};
        default:
            return {{16, 2, 0}, {16, kTile, 0}};
    }
}

// Returns the largest power of two that divides `dim`, up to kMaxRotation.
int rotation_of(int dim) {
    int rotation = 1;
    while (rotation < kMaxRotation && dim % (2 * rotation) == 0) rotation *= 2;
    return rotation;
}

}  // namespace

KvType index_type(KvType type) { return type == KvType::kF32 || type == KvType::kF16 ? type : KvType::kBF16; }

HeadLayout head_layout(const LayerShape& shape, KvType type, int block_tokens) {
    const Forms forms = forms_of(type);
    HeadLayout h{};
    h.k_dim = shape.k_dim;
    h.v_dim = shape.v_dim;
    h.k_pad = static_cast<int>(round_up(shape.k_dim, shape.latent ? kTile : forms.k.unit));  // as V is
    h.v_pad = static_cast<int>(round_up(shape.v_dim, forms.v.unit));
    h.k_scales = forms.k.scales;
    if (shape.latent && h.k_scales > 0 && shape.v_dim % kTile == 0 && shape.v_dim < shape.k_dim) {
        h.k_split = shape.v_dim;
        h.k_scales = 2;
        h.split_rotation = rotation_of(shape.k_dim - shape.v_dim);
    }
    h.latent = shape.latent;
    h.v_scales = shape.latent ? 0 : forms.v.scales;
    const int together = h.k_split > 0 ? h.k_split : shape.latent ? std::gcd(h.k_dim, h.v_dim) : h.k_dim;
    h.k_rotation = h.k_scales > 0 ? rotation_of(together) : 1;
    h.v_rotation = shape.latent ? h.k_rotation : h.v_scales > 0 ? rotation_of(h.v_dim) : 1;
    h.block_tokens = block_tokens;
    const auto lie_in = [&](int run) {  // whether what is chosen together lies in whole runs
        return block_tokens % run == 0 && (!shape.chooses() || (!shape.has_entries() && shape.index_pool % run == 0));
    };
    h.by_rows = !lie_in(kTile);
    h.run_tokens = h.by_rows || lie_in(kChunk) ? kChunk : kTile;
    h.k_row = static_cast<size_t>(h.k_pad) * forms.k.bits / 8;
    const size_t v_row = static_cast<size_t>(h.v_pad) * forms.v.bits / 8, scales = 2 * (h.k_scales + h.v_scales);
    h.row_bytes = h.k_row + (shape.latent ? 0 : v_row) + scales;
    h.made_bytes = shape.latent ? kChunk * v_row : 0;
    h.scales = h.run_tokens * h.k_row;
    h.v_units = h.scales + h.run_tokens * scales;
    h.run_bytes = h.run_tokens * h.row_bytes;
    h.head_bytes = block_tokens * h.row_bytes;
    return h;
}

std::vector<LayerLayout> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens) {
    check_shapes(layers, block_tokens);
    std::vector<LayerLayout> out;
    for (const LayerShape& s : layers) {
        if (s.latent && (type == KvType::kK8V4 || type == KvType::kI4))
            throw std::invalid_argument("kv_dtype: expected float32, float16, bfloat16 or int8 for values in K, got " +
                                        std::string(type == KvType::kI4 ? "int4" : "k8v4"));
        LayerLayout l{};
        l.shape = s;
        l.block_tokens = block_tokens;
        l.entries = s.has_entries() ? std::max<int>(block_tokens / s.compress_rate, 1) : 0;
        l.head = head_layout(s, type, block_tokens + l.entries);
        l.block_bytes = l.kv_bytes = round_up(l.head.head_bytes * s.kv_heads, 64);
        l.token_head_bytes = static_cast<double>(l.head.head_bytes) / l.head.block_tokens;
        if (s.has_indexer()) {
            const LayerShape keys{1, s.index_dim, 1, s.index_heads, 1.0f, {}, 0.0f, false, true};
            l.index = head_layout(keys, index_type(type),
                                  s.has_entries() ? l.entries
                                  : s.has_pools() ? static_cast<int>(block_tokens / s.index_pool)
                                                  : block_tokens);
            l.block_bytes += round_up(l.index.head_bytes, 64);
        }
        out.push_back(l);
    }
    return out;
}

size_t bytes_per_block(const std::vector<LayerLayout>& layers) {
    size_t total = 0;
    for (const LayerLayout& l : layers) total += l.block_bytes;
    return total;
}

LayerGroups group_layers(const std::vector<LayerLayout>& layers) {
    std::vector<LayerShape> shapes;
    std::vector<int64_t> bytes;
    for (const LayerLayout& l : layers) {
        shapes.push_back(l.shape);
        bytes.push_back(static_cast<int64_t>(l.block_bytes));
    }
    return group_layers(shapes, bytes);
}

}  // namespace hpcdecode
