// The KV cache of an R-rank on a device: a block table on the host, an arena and kernels on the device.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "batch.h"
#include "block_table.h"
#include "device.h"
#include "latent_api.h"
#include "layer_groups.h"
#include "layout.h"
#include "matrix.h"
#include "placed_pages.h"

namespace hpcdecode {

struct KvCacheOptions {
    KvType kv_type;
    int64_t capacity_tokens;
    int max_sequences, block_tokens;
    int device;
    int batches = 18;  // calls whose sequences stay on the device: two for each lane of a step, and two
    FrameOptions frames{};
    bool windowed = false;  // drop what leaves windows
    int lookahead = 0;      // positions by which sequences may be truncated then
};

// Returns whether there are kernels for these layers, and room for them in the shared memory of a device's blocks.
bool serves(const std::vector<LayerShape>& layers, KvType type, int device);

// A paged KV cache. hpcdecode/_attn_cuda.pyi describes the methods.
//
// Calls exclude each other. They put their work on a stream and return before it is done; matrices must stay until
// then. A call on another stream waits for the work of the last one. Bad arguments throw std::invalid_argument before
// anything changes.
class KvCache {
  public:
    KvCache(const std::vector<LayerShape>& layers, const KvCacheOptions& options);
    ~KvCache();

    void extend(const int32_t* slots, const int32_t* counts, int n, Stream stream);
    void append(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& kv, Stream stream);
    void attend(int layer, const int32_t* slots, const int32_t* counts, int n, const Matrix& qkv, const Matrix& out,
                const std::vector<float>* sinks, Stream stream);
    void release(const int32_t* slots, int n);
    void fork(int src, int dst);
    void truncate(int slot, int64_t length);
    int64_t length(int slot);
    void check();

    std::vector<int32_t> blocks(int slot);

    // Of KV caches with frames; see placed_pages.h. Pages lie where calls that were told of before find them until
    // these are done, which the owner waits for.
    void place_pages(const int32_t* frames, int n);
    std::vector<BlockTable::Copy> take_copies();
    void mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks, int64_t size);
    std::vector<int32_t> written_blocks(const int32_t* slots, const int32_t* counts, int n);
    void mark_used(uint8_t* marks, int64_t size);
    int ranges() const { return table_.nodes(); }
    size_t frame_bytes() const { return placed_.options().range_blocks * layers_.front().head.block_bytes; }

    const BlockTable& table() const { return table_; }
    // Memory in which blocks lie one after the other: that of each layer, or of groups of layers.
    struct Strip {
        uint8_t* base;
        int64_t block_bytes;
    };
    std::vector<Strip> strips() const;
    int device() const { return device_; }
    int64_t arena_blocks() const { return placed_.framed() ? placed_.blocks() : table_.block_count(); }  // of a layer
    size_t bytes() const { return arena_.size(); }
    int64_t bytes_read() const { return bytes_read_; }

  private:
    struct Sinks {
        std::vector<float> values;
        Memory memory;
    };

    Batch& batch_for(const int32_t* slots, const int32_t* counts, int n, const Cut& cut, Stream stream);
    void append_rows(int layer, const Batch& batch, const Matrix& rows, int64_t first_column, Stream stream);
    void attend_latents(const LayerArgs& layer, const LatentForm& form, const Batch& batch, const Matrix& qkv,
                        const Matrix& out, const float* sinks, Stream stream);
    int64_t place_layers();
    void grow_partials(size_t bytes);
    const float* upload(Sinks& sinks, const std::vector<float>& values, Stream stream);
    void enter(Stream stream);

    std::vector<LayerShape> shapes_;
    KvType type_;
    int device_;
    size_t most_batches_;
    size_t shared_;  // bytes that a block may have
    std::vector<LayerArgs> layers_;
    std::vector<int64_t> own_bytes_;  // of a block of each layer
    LayerGroups groups_;
    BlockTable table_;
    PlacedPages placed_;
    std::vector<BlockTable::Copy> left_copies_;  // of caches with frames: what `extend` has left to be made
    uint64_t version_ = 1, turn_ = 0;
    std::mutex mutex_;
    Memory arena_, layer_table_, partials_;
    std::vector<Batch> batches_;
    Memory copies_, copies_pinned_;
    std::vector<Sinks> sinks_;
    Event last_;  // end of the work so far
    Event copied_;
    Stream stream_ = nullptr;  // of the last call
    int64_t bytes_read_ = 0;
};

}  // namespace hpcdecode
