// The arguments and the table of an instruction set's kernels.
//
// Plain data only: files compiled for different instruction sets include this header, so it must define no function.
#pragma once
#include <cstddef>
#include <cstdint>

#include "recur_api.h"
#include "types.h"

namespace hpcdecode {

// Arithmetic depends on absolute positions, never on blocks or batches. A tile of 16 tokens fills one vector. A chunk
// of 64 tokens is scored together. A piece of 1024 tokens has a partial result.
constexpr int kTile = 16;
constexpr int kChunk = 64;
constexpr int kPiece = 1024;
constexpr int kTilesPerChunk = kChunk / kTile;
constexpr int kMaxPassRows = 32;   // query rows that share one pass over K or V, in the kernels of any ISA
constexpr int kMaxRowBlock = 128;  // query rows (tokens x group) that one item holds in scratch
constexpr int kMaxRotation = 256;  // elements of K and V that are rotated together, at most

// How a block keeps one KV head of a layer. Sizes are in bytes unless said otherwise.
//
// If block_tokens is a multiple of 16, tokens lie in runs: of 64 if block_tokens is a multiple of 64, else of 16. A run
// is [K units][scales][V units], in the order in which kernels read, so that they read memory in a straight line.
// storage.h has the order of units. For any other block_tokens, tokens lie in rows, [block_tokens][K row, V row,
// scales]; they are gathered into a run of 64 before use.
//
// Types of whole numbers have `k_scales` bfloat16 for K of a token and `v_scales` for V: the scale, and the middle if
// there are two. A run has each of them for all its tokens, one after the other. The elements are rotated: K and V are
// multiplied by a Hadamard matrix in parts of k_rotation and v_rotation elements (rotate.h).
//
// A latent layer has its values in K: there are no V units and no v_scales, and kernels make V units of a chunk's K
// units in their own memory (values_in_keys.h). In whole numbers K has a scale for the values, and one for its other
// dims.
struct HeadLayout {
    int k_dim, v_dim;             // elements
    int k_pad, v_pad;             // elements, as stored
    int block_tokens;             // tokens
    int run_tokens;               // tokens: 64 or 16
    int k_scales, v_scales;       // bfloat16 a token
    int k_rotation, v_rotation;   // elements, a power of two; 1: as they came
    int k_split, split_rotation;  // K from dim k_split on has a scale and a rotation of its own; k_split 0: none
    bool by_rows;                 // row layout
    bool latent;                  // V is the first v_dim elements of K
    size_t scales;                // in a run: after the K units
    size_t v_units;               // in a run: after the scales
    size_t run_bytes;             // whole run
    size_t k_row;                 // row layout: K part
    size_t row_bytes;             // row layout: whole row, scales at its end
    size_t head_bytes;            // one KV head of one block
    size_t made_bytes;            // V units of a chunk, of a latent layer; else 0
};

// The K and V of one KV head of one sequence.
struct HeadView {
    uint8_t* base;          // block 0 of this layer and head
    const int32_t* blocks;  // block ids of the sequence
    size_t block_bytes;     // distance between blocks of this layer
    const HeadLayout* layout;
};

struct AppendArgs {
    HeadView kv;
    const void* k;  // [count] rows of k_dim
    const void* v;  // [count] rows of v_dim
    ActType type;
    int64_t stride;  // elements between rows
    int64_t position;
    int64_t count;
};

// Tokens of one KV head in a block, and rows with the bytes that each takes there: K, V, scales.
struct TokenArgs {
    const HeadLayout* layout;
    uint8_t* block;    // of this head
    int first, count;  // tokens of the block
    uint8_t* rows;
    int64_t stride;  // bytes between rows
};

// Numbers added to scores by the distance between query and key, as PositionBias says.
struct BiasArgs {
    const float* profiles;  // [dim] of the largest distance, extent - 1; null: minus the distance
    int64_t stride;         // floats between profiles
    int64_t extent;
    int dim;            // 0: no biases
    const void* mixes;  // [heads * group][dim] of the first head and query token; of q's type and stride
};

// One more logit in the softmax's denominator of each query row: that of its head, or of its token and head, or none.
struct SinkArgs {
    const float* of_heads;  // [heads * group] or null
    const void* of_rows;    // [heads * group] of the first query token, or null
    ActType type;           // of these
    int64_t stride;         // elements between query tokens
};

// Attention over some pieces of some KV heads of one sequence, for one block of query rows.
//
// Row r of a head belongs to query token r / group and to query head r % group of that KV head. `kv`, `q`, `sinks` and
// `out` belong to the first head.
struct AttendArgs {
    HeadView kv;
    int heads;
    const void* q;
    ActType type;         // of q and out
    int64_t q_stride;     // elements between query tokens
    int first_row, rows;  // of each head; rows <= kMaxRowBlock
    int group;
    int64_t length;         // positions held, new tokens included
    const int32_t* chosen;  // positions that stand for 0, 1, ..., or for the first ones of runs; null: themselves
    AppendArgs fresh;       // first head's new tokens to be written on the way; count 0: none
    int64_t new_tokens;     // query token j sees positions < length - new_tokens + j + 1
    Window window;
    float scale, softcap;  // softcap 0: none
    BiasArgs bias;
    int64_t piece_begin, piece_end;
    bool fold;               // fold all pieces into one partial; only for the first pieces of a sequence
    float* partials;         // null: finish and write out; else [1 or pieces][heads][rows][2 + v_pad]
    int64_t partial_stride;  // floats between pieces
    SinkArgs sinks;
    void* out;
    int64_t out_stride;  // elements between query tokens
    uint8_t* scratch;    // 64-byte aligned, see scratch_bytes in kv_cache.cpp
};

// The scores by which an indexer chooses tokens for one query token: for each of positions [begin, end) the sum over
// heads of weight * max(q.k, 0), or q.k of each head.
struct IndexArgs {
    HeadView keys;
    const void* q;        // [heads][k_dim]
    const void* weights;  // [heads]; null: scores of each head
    ActType type;         // of q and weights
    int heads;
    int64_t begin, end;      // begin is a multiple of kChunk
    float* scores;           // of position `begin`; written up to the end of the last chunk
    int64_t scores_of_head;  // between the scores of heads
    uint8_t* scratch;        // 64-byte aligned, see index_scratch_bytes in choice.cpp
};
constexpr int kNumIndexTypes = 3;  // the first ones of KvType

struct MergeArgs {
    const float* partials;  // [count][heads][rows][2 + v_pad], in order
    int64_t partial_stride;
    int count, heads, rows, group, v_dim, v_pad;
    int v_rotation;
    SinkArgs sinks;
    void* out;
    ActType type;
    int64_t out_stride;
    uint8_t* scratch;
};

// In prompts, K and V of a KV head lie in tiles of kPromptTile positions: [k_words][kPromptTile] words of K, then
// [kPromptTile / word_elements][v_pad] words of V. A word has four bytes: one float, or two bfloat16, neighbours along
// k_dim (K) or along the positions (V).
constexpr int kPromptTile = 64;
constexpr int kPromptItemRows = 96;  // query rows (tokens x group) of one item, unless the group is larger

struct PromptLayout {
    int k_dim, v_dim;     // elements
    int k_words, v_pad;   // words of a K column, padded elements of a V row
    int64_t v_offset;     // words from the start of a tile
    int64_t tile_words;   // one tile of one KV head
    int64_t tile_stride;  // words between the tiles of a KV head: those of the other heads lie between
};

struct PromptPackArgs {
    const PromptLayout* layout;
    uint32_t* tiles;  // of this head
    const void* k;    // [count] rows of k_dim
    const void* v;    // [count] rows of v_dim
    ActType type;
    int64_t k_stride, v_stride;  // elements between rows
    int64_t position, count;
};

// Attention of some query tokens for one KV head. Row r is query token r / group and query head r % group of that head.
struct PromptAttendArgs {
    const PromptLayout* layout;
    const uint32_t* tiles;
    const void* q;
    ActType type;      // of q and out
    int64_t q_stride;  // elements between tokens
    int group;
    int64_t position, count;  // of the first query token; tokens
    Window window;
    float scale, softcap;  // softcap 0: none
    BiasArgs bias;
    SinkArgs sinks;
    void* out;
    int64_t out_stride;
    uint8_t* scratch;  // 64-byte aligned, see scratch_bytes in prefill.cpp
};

struct PromptKernel {
    int word_elements;
    int rows;        // of one pass
    int word_block;  // words of K come in multiples of it, the last ones zero
    void (*pack)(const PromptPackArgs&);
    void (*attend)(const PromptAttendArgs&);
};

// How the decode kernels of an ISA prefetch what they read.
struct Prefetching {
    int unaided_rows;  // passes of up to so many rows leave elements of two bytes and more to the hardware
    size_t ahead;      // bytes between what is read and what is prefetched
    int locality = 3;  // 3: into the first level of the cache, 2: the second
};

struct KernelTable {
    const char* name;
    void (*append[kNumKvTypes])(const AppendArgs&);
    void (*save[kNumKvTypes])(const TokenArgs&);     // from the block to rows
    void (*restore[kNumKvTypes])(const TokenArgs&);  // and back, in order: a tile is cleared before its first token
    void (*attend[kNumKvTypes])(const AttendArgs&);
    void (*score[kNumIndexTypes])(const IndexArgs&);
    void (*merge)(const MergeArgs&);
    PromptKernel prompts[2];                                  // by ActType of the activations
    double (*read)(const uint8_t* data, size_t bytes);        // touches every cache line once, for bandwidth figures
    void (*rewrite)(uint8_t* data, size_t bytes, float one);  // reads and writes all floats, times 1
    RecurKernel recur;
};

}  // namespace hpcdecode
