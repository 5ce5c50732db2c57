// GEMMs of rows by packed weights.
//
// Weights in few bits (weight_form.h) are expanded to such panels: in registers for few rows, else once for all rows.
// So results are, bit for bit, those of the expanded weights.
//
// A word has 4 bytes: one float32, two bfloat16 or four int8 numbers. A panel holds 32 outputs, in rows of one word per
// output: what the sums begin with (float32, or int32 for int8), for int8 the outputs' scales (float32), then the
// weights word by word. Sums run along the words in order, so a row's bits depend neither on other rows nor on the
// threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "beside.h"
#include "fused_kernel.h"
#include "row_values.h"
#include "team.h"
#include "weight_form.h"

namespace hpcdecode::ops {

constexpr int kPanel = 32;          // outputs
constexpr int kTileRows = 14;       // rows that share a pass over a panel, because their sums fill the registers
constexpr int kMostTileRows = 128;  // the same where sums wait in memory, in tile registers: the most that there are

// The work of one kernel call: some rows by a panel, or by two that lie one after the other.
struct Tile {
    const char* x;    // or its values (row_values.h)
    int64_t x_bytes;  // from row to row, as out_bytes
    const uint32_t* panel;
    int64_t words;
    char* out;
    int64_t out_bytes;
    int columns;               // of the last panel's outputs, the first are wanted
    Lines next;                // to fetch meanwhile, a cache line a word at most
    bool in_few_bits = false;  // the panel is in the weight's form, to be expanded in registers
    int panels = 1;
    int64_t panel_words = 0;  // from the first panel to the second
    int64_t out_apart = 0;    // bytes from the first panel's results to the second's
};

using TileKernel = void (*)(const Tile&, int rows);

// Tiles that expand weights in few bits as they take them.
struct DirectTiles {
    TileKernel tile = nullptr;
    int rows = 0;         // of a tile, at most
    bool always = false;  // whether such tiles serve more rows, too; else these take plain panels
    int paired = 0;       // rows, at most, for which a tile may have two panels
};

// How a GEMM takes weights and rows.
struct Form {
    Form(WeightForm of_weights, bool rounded_rows = false) : weights(of_weights), rounded(rounded_rows) {}

    WeightForm weights;
    bool rounded;  // rows are rounded to int8, with a scale for 32 inputs (RoundedInputs)
};

// Some of a weight's panels.
struct Panels {
    int64_t first, last;
};

// Some of the rows.
struct RowRange {
    int64_t first, last;
};

// What a GEMM adds to its outputs: B_a h, for each row that has an adapter a (LoRA).
struct Update {
    Rows adapters;  // of each row, int64; -1 for none
    Rows low;       // h, of the type of x
    Rows weight;    // packed weights B of all adapters, one after the other
};

class Product {
  public:
    // Describes the GEMM of x [tokens, 4 * words bytes of type `in`] to [tokens, outputs of type `out`].
    // gate: silu or gelu_tanh. It halves the outputs: the gate of a panel's first half times its second half.
    // form: But for `plain`, inputs must be a multiple of kBlockInputs.
    // heads: With several, each has `words` words of a row, and `outputs` of its own, whose panels follow on those of
    // the head before; its last panel may be partly filled.
    // update: The GEMM of h to the outputs, before a gate, by one of `adapters` adapters; or null.
    // Throws std::invalid_argument for types that are not `offered`, and if a gate would find the last panel partly
    // filled.
    Product(Type in, Type out, int64_t words, int64_t outputs, const std::string& isa, std::optional<Op> gate = {},
            Form form = WeightForm::plain, int64_t heads = 1, std::shared_ptr<const Product> update = nullptr,
            int64_t adapters = 0);

    // Returns whether the instruction set has GEMMs of these types.
    static bool offered(Type in, Type out, const std::string& isa, std::optional<Op> gate = {},
                        Form form = WeightForm::plain);

    // Computes the panels of one of `members` threads for all rows.
    // next: First panel of a later GEMM, to prefetch, or null. beside: Work to take along, or null.
    void run(int64_t rows, const Rows& x, const Rows& weight, const Rows& out, int member, int members,
             const char* next, Beside* beside) const;

    // Computes them with an update, if it has one. The bits of a row without an adapter are those that it has in `run`.
    // panels: Those that are computed; others of `out` stay as they are.
    void run_updated(int64_t rows, const Rows& x, const Rows& weight, const Rows& out, const Update& update,
                     const Panels& panels, const char* next, Beside* beside) const;

    // Calls visit(tile, row, count, panel) for every tile of some panels; the tile has no `out` yet. Many rows are
    // taken in blocks that stay in a core's cache, and panels in order for each block.
    // pairs: Whether tiles may have two panels, of which `panel` is the first.
    template <bool pairs = false, class Visit>
    void each_tile(int64_t rows, const Rows& x, const Rows& weight, const Panels& panels, const char* next,
                   Beside* beside, const Visit& visit) const;

    // Computes a tile, without or with the gate.
    void compute(const Tile& tile, int rows) const { (tile.in_few_bits ? direct_.tile : tiles_)(tile, rows); }
    void multiply(Tile& tile, int rows) const;

    // Returns the panels of one of `members` threads.
    Panels own(int member, int members) const {
        return {share(panels(), member, members), share(panels(), member + 1, members)};
    }

    // Returns where a member's first panel, or panel `number`, begins in `weight`.
    const char* panel(const Rows& weight, int member, int members) const;
    const uint32_t* panel(const Rows& weight, int64_t number) const {
        return reinterpret_cast<const uint32_t*>(weight.data) + number * panel_words_;
    }
    int columns(int64_t panel) const {
        return static_cast<int>(std::min<int64_t>(kPanel, outputs_ - panel % head_panels_ * kPanel));
    }
    int64_t panels() const { return heads_ * head_panels_; }
    int64_t heads() const { return heads_; }
    int tile_rows() const { return tile_rows_; }
    bool updates() const { return update_ != nullptr; }
    const Product& update() const { return *update_; }  // if it has one
    bool gated() const { return gate_ != nullptr; }
    int64_t out_size() const { return out_size_; }

    // Adds `count` numbers of the type of `out`, rounded to it.
    void add(int64_t count, const char* in, char* out) const { add_(count, in, out); }

    // Returns the bytes of all panels, of a row of `x` of one head, and of a row of `out`.
    int64_t weight_bytes() const { return panels() * panel_words_ * sizeof(uint32_t); }
    int64_t x_bytes() const { return words_ * sizeof(uint32_t); }
    int64_t value_bytes() const { return value_bytes_; }  // as tiles take it
    int64_t out_bytes() const { return heads_ * outputs_ * columns_ / kPanel * out_size_; }

    // Returns where the results of a panel begin in a row of `out`, and their bytes.
    int64_t first_byte(int64_t panel) const {
        return (panel / head_panels_ * outputs_ + panel % head_panels_ * columns_) * out_size_;
    }
    int64_t bytes(int64_t panel) const { return (gate_ != nullptr ? columns_ : columns(panel)) * out_size_; }

  private:
    bool direct(int64_t rows) const { return direct_.tile != nullptr && (direct_.always || rows <= direct_.rows); }
    int64_t blocks(int64_t rows) const;
    const uint32_t* expanded(const uint32_t* panel) const;
    template <bool pairs = false, class Visit>
    void each_tile_of(const RowRange& block, const Rows& x, const Rows& weight, const Panels& panels, const char* next,
                      Beside* beside, const Visit& visit) const;

    int64_t words_, outputs_, heads_, head_panels_, panel_words_;  // outputs_, head_panels_: of a head
    int64_t out_size_, columns_;                                   // columns_: of `out`, of a panel
    int tile_rows_;                                                // of a tile, at most
    TileKernel tiles_;
    DirectTiles direct_;                                                // without a tile for plain weights
    ValuesKernel values_;                                               // or null: tiles take x as it is
    void (*expand_)(const char* panel, int64_t inputs, uint32_t* out);  // or null: the weights are plain
    int64_t inputs_, value_bytes_;
    void (*gate_)(int64_t rows, const char* results, char* out, int64_t out_bytes);
    std::shared_ptr<const Product> update_;
    int64_t adapters_;
    void (*add_)(int64_t count, const char* in, char* out);
};

template <bool pairs, class Visit>
void Product::each_tile(int64_t rows, const Rows& x, const Rows& weight, const Panels& panels, const char* next,
                        Beside* beside, const Visit& visit) const {
    const int64_t count = blocks(rows);
    for (int64_t b = 0; b < count; ++b) {
        const int64_t first = share(rows, b, count), last = share(rows, b + 1, count);
        const char* then = b + 1 < count ? reinterpret_cast<const char*>(panel(weight, panels.first)) : next;
        each_tile_of<pairs>({first, last}, x, weight, panels, then, beside, visit);
    }
}

template <bool pairs, class Visit>
void Product::each_tile_of(const RowRange& block, const Rows& x, const Rows& weight, const Panels& panels,
                           const char* next, Beside* beside, const Visit& visit) const {
    const int64_t rows = block.last - block.first;
    if (panels.first == panels.last) return;
    const RowValues own(values_, rows, {x.data + block.first * x.row_bytes, x.row_bytes}, heads_ * words_,
                        heads_ * value_bytes_);
    const int64_t most = direct(rows) ? direct_.rows : tile_rows_, tiles = (rows + most - 1) / most;
    const bool paired = pairs && direct(rows) && rows <= direct_.paired;
    for (int64_t p = panels.first, after; p < panels.last; p = after) {
        const bool both = paired && p + 1 < panels.last && (p + 1) % head_panels_ != 0;
        after = p + 1 + both;
        const int64_t panel_bytes = (after - p) * panel_words_ * static_cast<int64_t>(sizeof(uint32_t));
        const int64_t ahead =
            std::min(words_ * kLine * (tiles == 1 ? 2 : 1), panel_bytes);  // bytes that a tile fetches
        const uint32_t* from = panel(weight, p);
        const auto* following = after < panels.last ? reinterpret_cast<const char*>(panel(weight, after)) : next;
        const uint32_t* shown = expand_ == nullptr || direct(rows) ? from : expanded(from);
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = block.first + share(rows, t, tiles), end = block.first + share(rows, t + 1, tiles);
            const char* from_row =
                own.rows().data + (row - block.first) * own.rows().row_bytes + p / head_panels_ * value_bytes();
            Tile tile{from_row, own.rows().row_bytes, shown, words_, nullptr, 0, columns(after - 1), {}, direct(rows)};
            tile.panels = static_cast<int>(after - p);
            tile.panel_words = panel_words_;
            if (following != nullptr && (t + 1) * ahead <= panel_bytes) {
                tile.next = {following + t * ahead, following + (t + 1) * ahead};
            } else if (beside != nullptr) {
                tile.next = beside->fetch(ahead);
            }
            visit(tile, row, static_cast<int>(end - row), p);
        }
        if (beside != nullptr) beside->work();
    }
}

}  // namespace hpcdecode::ops
