#include "layout.h"

namespace hpcdecode {
namespace {

size_t round_up(size_t x, size_t unit) { return (x + unit - 1) / unit * unit; }

bool scaled(KvType type) { return type == KvType::kI8 || type == KvType::kI4; }

size_t bytes_of(KvType type, size_t elements) {
    switch (type) {
        case KvType::kF32:
            return elements * 4;
        case KvType::kI8:
            return elements;
        case KvType::kI4:
            return elements / 2;
        default:
            return elements * 2;
    }
}

}  // namespace

HeadLayout head_layout(const LayerShape& shape, KvType type, int block_tokens) {
    const size_t scale = scaled(type) ? 2 : 0;
    HeadLayout h{};
    h.k_dim = shape.k_dim;
    h.v_dim = shape.v_dim;
    h.k_pad = static_cast<int>(round_up(shape.k_dim, scaled(type) ? 8 : 2));
    h.v_pad = static_cast<int>(round_up(shape.v_dim, kTile));
    h.block_tokens = block_tokens;
    h.by_rows = block_tokens % kTile != 0;
    h.run_tokens = h.by_rows || block_tokens % kChunk == 0 ? kChunk : kTile;
    h.scales = bytes_of(type, static_cast<size_t>(h.run_tokens) * h.k_pad);
    h.v_units = h.scales + 2 * scale * h.run_tokens;
    h.run_bytes = h.v_units + bytes_of(type, static_cast<size_t>(h.run_tokens) * h.v_pad);
    h.k_row = bytes_of(type, h.k_pad);
    h.row_bytes = h.k_row + bytes_of(type, h.v_pad) + 2 * scale;
    h.head_bytes = h.by_rows ? block_tokens * h.row_bytes : block_tokens / h.run_tokens * h.run_bytes;
    return h;
}

std::vector<LayerLayout> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens) {
    check_shapes(layers, block_tokens);
    std::vector<LayerLayout> out;
    for (const LayerShape& s : layers) {
        LayerLayout l{};
        l.shape = s;
        l.head = head_layout(s, type, block_tokens);
        l.block_bytes = round_up(l.head.head_bytes * s.kv_heads, 64);
        l.token_head_bytes = static_cast<double>(l.head.head_bytes) / block_tokens;
        out.push_back(l);
    }
    return out;
}

size_t bytes_per_block(const std::vector<LayerLayout>& layers) {
    size_t total = 0;
    for (const LayerLayout& l : layers) total += l.block_bytes;
    return total;
}

}  // namespace hpcdecode
