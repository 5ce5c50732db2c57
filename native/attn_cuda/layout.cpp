#include "layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "latent_api.h"

namespace hpcdecode {
namespace {

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
    if (s.chooses())
        invalid("expected layers that attend to all tokens on a device, got one with an indexer or entries");
    if (s.bias.dim > 0 || s.row_sinks)
        invalid("expected layers whose scores are q.k alone on a device, got one with biases or sinks of rows");
    if (s.latent && type == KvType::kI8)
        invalid("kv_dtype: expected float32, float16 or bfloat16 for values in K on a device, got 'int8'");
    const int most = s.latent ? kMaxLatentVDim : kMaxVDim;
    if (s.v_dim > most)
        invalid("expected V heads of at most " + std::to_string(most) + " dims on a device, got " +
                std::to_string(s.v_dim));
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

LayerGroups group_layers(const std::vector<LayerShape>& shapes, const std::vector<LayerArgs>& layers) {
    std::vector<int64_t> bytes;
    for (const LayerArgs& l : layers) bytes.push_back(l.head.block_bytes);
    return group_layers(shapes, bytes);
}

}  // namespace hpcdecode
