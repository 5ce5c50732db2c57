#include "shape.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace hpcdecode {
namespace {

void require(bool ok, size_t layer, const char* what) {
    if (!ok) throw std::invalid_argument("layer " + std::to_string(layer) + ": " + what);
}

// Every block has whole entries, or the last tokens of entries lie at the ends of blocks.
void check_entries(const LayerShape& s, int block_tokens, size_t layer) {
    require(s.latent && s.window && !s.window.chunked && s.index_topk <= INT32_MAX, layer,
            "entries need a latent with a window that moves");
    require((s.index_topk > 0) == s.has_indexer() && !s.has_pools(), layer,
            "entries are chosen by the layer's own indexer");
    const bool whole = block_tokens % s.compress_rate == 0;
    require(whole || (!s.has_indexer() && s.compress_rate % block_tokens == 0), layer,
            "the tokens of a block must be a multiple of compress_rate, or without an indexer the other way round");
}

// Returns whether what was chosen for the layer before can be attended to.
bool takes_after(const LayerShape& s, const LayerShape& before) {
    return before.chooses() && s.index_pool == before.index_pool && s.choices() == before.choices();
}

}  // namespace

PositionBias PositionBias::of(int dim, const std::vector<float>& profiles) {
    if (dim < 0 || (!profiles.empty() && (dim == 0 || profiles.size() % dim != 0))) {
        throw std::invalid_argument("bias_profiles: expected [bias_dim, extent] numbers, or none");
    }
    PositionBias bias;
    bias.dim = dim;
    if (profiles.empty()) return bias;
    bias.extent = static_cast<int64_t>(profiles.size()) / dim;
    std::vector<float> reversed(dim * bias.stride(), 0.0f);
    for (int64_t i = 0; i < dim; ++i)
        std::reverse_copy(profiles.begin() + i * bias.extent, profiles.begin() + (i + 1) * bias.extent,
                          reversed.begin() + i * bias.stride() + kMargin);
    bias.profiles = std::make_shared<const std::vector<float>>(std::move(reversed));
    return bias;
}

KvType parse_kv_type(const std::string& name) {
    if (name == "float32") return KvType::kF32;
    if (name == "float16") return KvType::kF16;
    if (name == "bfloat16") return KvType::kBF16;
    if (name == "int8") return KvType::kI8;
    if (name == "k8v4") return KvType::kK8V4;
    if (name == "int4") return KvType::kI4;
    throw std::invalid_argument("kv_dtype: expected float32, float16, bfloat16, int8, k8v4 or int4, got '" + name +
                                "'");
}

void check_block_tokens(int block_tokens) {
    if (block_tokens >= 1) return;
    throw std::invalid_argument("block_tokens: expected at least 1, got " + std::to_string(block_tokens));
}

int default_block_tokens(const std::vector<LayerShape>& layers) {
    constexpr int64_t kMost = 4096;
    int64_t tokens = kDefaultBlockTokens;
    for (const LayerShape& s : layers)
        if (s.has_pools() && s.index_pool <= kMost) tokens = std::min(std::lcm(tokens, s.index_pool), kMost);
    return static_cast<int>(tokens);
}

void check_shapes(const std::vector<LayerShape>& layers, int block_tokens) {
    if (layers.empty()) throw std::invalid_argument("expected at least one attention layer, got none");
    check_block_tokens(block_tokens);
    for (size_t i = 0; i < layers.size(); ++i) {
        const LayerShape& s = layers[i];
        require(s.kv_heads >= 1 && s.k_dim >= 1 && s.v_dim >= 1 && s.q_heads >= 1, i, "heads and dims must be >= 1");
        require(s.q_heads % s.kv_heads == 0, i, "q_heads must be a multiple of kv_heads");
        require(s.scale > 0 && s.scale < 1e30f, i, "scale must be a positive number");
        require(!s.latent || (s.kv_heads == 1 && s.v_dim <= s.k_dim), i,
                "values in K need one KV head, and v_dim <= k_dim");
        require(s.compress_rate >= 0 && s.compress_rate <= INT32_MAX, i, "compress_rate must be positive, or 0");
        require(s.window.size >= 0 && s.softcap >= 0, i, "window and softcap must be positive, or None");
        require(s.index_topk >= 0 && s.index_heads >= 0 && (s.index_heads > 0) == (s.index_dim > 0), i,
                "an indexer needs heads, dims and a number of tokens to choose");
        require(s.index_topk > 0 || !s.has_indexer(), i, "an indexer chooses at least one token");
        require((s.bias.dim == 0 && !s.row_sinks) || (!s.chooses() && !s.latent && s.softcap == 0), i,
                "scores with biases are of all tokens, of keys of their own, and not capped");
        require(!s.sinks || !s.row_sinks, i, "sinks are those of the layer, or of its rows");
        if (s.has_entries()) {
            check_entries(s, block_tokens, i);
            continue;
        }
        require(!s.chooses() || (!s.window && s.index_topk <= INT32_MAX), i,
                "an indexer chooses tokens where there is no window");
        require(s.index_pool >= 1 && s.index_topk % s.index_pool == 0, i,
                "the tokens that an indexer chooses must be whole pools");
        require(!s.has_pools() || block_tokens % s.index_pool == 0, i, "the tokens of a block must be whole pools");
        require(s.index_local >= 0 && (!s.has_blocks() || !s.has_indexer() || s.index_heads == s.kv_heads), i,
                "every KV head needs an index head of its own, and local blocks must be positive, or 0");
        require(!s.chooses() || s.has_indexer() || (i > 0 && takes_after(s, layers[i - 1])), i,
                "a layer without an indexer attends to what the layer before it chose");
    }
}

}  // namespace hpcdecode
