#include "batch.h"

#include <algorithm>
#include <cstring>

namespace hpcdecode {
namespace {

static_assert(kWindowStep % kTile == 0, "kernels read whole tiles, from the one on in which a window begins");

int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

// Copies `values` to `host` + `at`; returns its address on the device.
template <class T>
const T* put(const std::vector<T>& values, uint8_t* host, const uint8_t* device, size_t& at) {
    const size_t begin = at, bytes = values.size() * sizeof(T);
    if (bytes > 0) std::memcpy(host + begin, values.data(), bytes);
    at += (bytes + 15) / 16 * 16;
    return reinterpret_cast<const T*>(device + begin);
}

template <class T>
size_t room(const std::vector<T>& values) {
    return (values.size() * sizeof(T) + 15) / 16 * 16;
}

}  // namespace

bool Batch::holds(const int32_t* slots, const int32_t* counts, int n, uint64_t version, const Cut& cut) const {
    return version == version_ && cut == cut_ && static_cast<size_t>(n) == slots_.size() &&
           std::equal(slots, slots + n, slots_.begin()) && std::equal(counts, counts + n, counts_.begin());
}

void Batch::fill(const BlockTable& table, const PlacedPages& placed, const int32_t* slots, const int32_t* counts, int n,
                 uint64_t version, const Cut& cut, Stream stream) {
    version_ = 0;  // holds nothing until it is filled
    longest_ = 0;
    slots_.assign(slots, slots + n);
    counts_.assign(counts, counts + n);
    sequences_.clear();
    std::vector<Item> items;
    std::vector<int32_t> blocks, sequence_of;
    for (int i = 0; i < n; ++i) {
        SequenceArgs s{};
        s.length = static_cast<int32_t>(table.length(slots[i]));
        s.count = counts[i];
        s.first_row = static_cast<int32_t>(sequence_of.size());
        const int64_t first = table.first_place(slots[i], cut.layers);
        s.first_block = static_cast<int32_t>(static_cast<int64_t>(blocks.size()) - first);
        s.first_position = static_cast<int32_t>(first * table.block_tokens());
        s.first_item = static_cast<int32_t>(items.size());
        s.row_blocks = cut.rows > 0 ? ceil_div(int64_t{s.count} * cut.group, cut.rows) : 0;
        if (s.count > 0) longest_ = std::max(longest_, s.length);
        for (int32_t piece = 0; s.row_blocks > 0 && int64_t{piece} * cut.piece < s.length; ++piece)
            for (int32_t b = 0; b < s.row_blocks; ++b) items.push_back({i, piece, b});
        const std::vector<int32_t>& held = table.blocks(slots[i], cut.layers);
        if (placed.framed())
            placed.find_all(held, table.first_block(slots[i], counts[i], cut.rows > 0), blocks);
        else
            blocks.insert(blocks.end(), held.begin() + first, held.end());
        sequence_of.insert(sequence_of.end(), s.count, i);
        sequences_.push_back(s);
    }
    const size_t bytes = room(sequences_) + room(items) + room(blocks) + room(sequence_of);
    last_use_.reach();  // nothing reads the old contents from here on
    pinned_.grow(bytes, Memory::Kind::kPinned);
    device_.grow(bytes, Memory::Kind::kDevice);
    auto *host = pinned_.as<uint8_t>(), *device = device_.as<uint8_t>();
    size_t at = 0;
    args_.sequences = put(sequences_, host, device, at);
    args_.items = put(items, host, device, at);
    args_.blocks = put(blocks, host, device, at);
    args_.sequence_of = put(sequence_of, host, device, at);
    args_.tokens = static_cast<int>(sequence_of.size());
    args_.item_count = static_cast<int>(items.size());
    copy_in(device, host, at, stream);
    last_use_.record(stream);
    version_ = version;
    cut_ = cut;
}

double Batch::bytes(const LayerArgs& layer, double token_bytes) const {
    double tokens = 0;
    for (const SequenceArgs& s : sequences_) {
        if (s.count == 0) continue;
        const int64_t first = layer.window.first(s.length - s.count + 1);
        tokens += static_cast<double>(s.length - first);
    }
    return tokens * token_bytes;
}

}  // namespace hpcdecode
