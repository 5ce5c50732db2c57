// The arguments of kernels, and their launches. Pointers are to device memory unless said otherwise.
#pragma once
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace hpcdecode {

// Arithmetic depends on absolute positions, never on blocks or batches. A tile of 64 tokens is scored together. A piece
// of 512 tokens has a partial result. 16 query rows share every read of K and V.
constexpr int kTile = 64;
constexpr int kPiece = 512;
constexpr int kRows = 16;
constexpr int kSlice = 16;  // tokens of a tile that a warp attends over, where products are of 16 bits
constexpr int kMaxVDim = 256;
constexpr int kMaxRotation = 256;

// How a block keeps one KV head of a layer: [block_tokens] rows of K, as many of V, then their scales, then their
// middles. Zeros pad rows to multiples of 16 elements and of 16 bytes, which threads load at once, neighbours next to
// each other. int8 is stored as code + 128, with a bfloat16 scale for K and one for V of a token, after a rotation of K
// and V in parts of k_rotation and v_rotation elements (rotate.h). V of k8v4 and int4, and K of int4, have a bfloat16
// middle, too, and codes of 4 bits and of 6 (kernels/codes.h).
//
// What attention must read of a token and head of 128 dims, in bytes: 512 of 16-bit types, 260 of int8, 128 + 64 + 6 of
// k8v4, 96 + 64 + 8 of int4.
struct HeadLayout {
    int k_dim, v_dim, k_pad, v_pad;  // elements
    int k_rotation, v_rotation;      // elements, a power of two; 1: as they came
    int block_tokens;
    int k_row, v_row;  // bytes
    bool k_middle, v_middle;
    int64_t v_rows, scales, middles;  // bytes from the head's start
    int64_t head_bytes, block_bytes;
};

// One sequence of a call. Its rows are those of the call's matrices.
struct SequenceArgs {
    int32_t length;  // new tokens included
    int32_t count;   // new tokens
    int32_t first_row;
    int32_t first_block;  // of its block ids
    int32_t first_item;   // item of piece p and row block b: first_item + p * row_blocks + b
    int32_t row_blocks;
    int32_t first_position;  // that has a place at the layers of the call
};

// A piece of a sequence for one block of 16 query rows. Row r is query token r / group and query head r % group of a KV
// head.
struct Item {
    int32_t sequence, piece, row_block;
};

struct BatchArgs {
    const SequenceArgs* sequences;
    const Item* items;
    const int32_t* blocks;       // block ids of all sequences
    const int32_t* sequence_of;  // by row
    int tokens, item_count;
};

struct LayerArgs {
    uint8_t* base;  // block 0
    HeadLayout head;
    int heads, group;  // KV heads; query heads of each
    Window window;
    float scale, softcap;  // softcap 0: none
    bool latent;           // the values are the first v_dim elements of K: blocks have no V
};

struct RowsArgs {
    const void* data;
    ActType type;
    int64_t stride;  // elements
};

struct AppendArgs {
    BatchArgs batch;
    LayerArgs layer;
    RowsArgs kv;  // rows [k | v]
};

// How a block attends.
struct AttendForm {
    int parts;   // 2: queries and weights are sums of two numbers of 16 bits each; 0: float32
    int stages;  // tiles that a warp has in shared memory or on their way there
    int smem;    // bytes
};

struct AttendArgs {
    BatchArgs batch;
    LayerArgs layer;
    AttendForm form;
    RowsArgs q;
    float* partials;  // [items][heads][kRows][2 + v_pad]: (m, sum, weighted values) for weights relative to 2^m
};

struct MergeArgs {
    BatchArgs batch;
    LayerArgs layer;
    const float* partials;
    const float* sinks;  // [heads * group] or null
    void* out;
    ActType type;
    int64_t stride;  // elements
};

struct CopyArgs {
    uint8_t* arena;
    const int64_t* layers;  // offset of every layer in the arena, then its bytes of a block
    const int32_t* blocks;  // pairs: from, to
    int copies, layer_count;
};

// Returns the form for `limit` bytes of shared memory, with most bytes on their way. act: Of queries.
AttendForm attend_form(const HeadLayout& head, KvType type, ActType act, size_t limit);

// Launch kernels on a stream. All throw std::runtime_error if the device refuses.
void launch_append(const AppendArgs& args, KvType type, void* stream);
void launch_attend(const AttendArgs& args, KvType type, void* stream);
void launch_merge(const MergeArgs& args, void* stream);
void launch_copy(const CopyArgs& args, void* stream);

}  // namespace hpcdecode
