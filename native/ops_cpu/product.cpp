#include "product.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernel_api.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int kHeads[] = {1, 1, 2};  // by type: rows of a panel before the weights

const TileKernel* tiles_of(Type in, Type out, const std::string& isa) {
    return out == Type::i8 ? nullptr : kernels_for(isa).products.of[static_cast<int>(in)][static_cast<int>(out)];
}

GateKernel gate_of(Type out, const std::string& isa, std::optional<Op> gate) {
    const Products& products = kernels_for(isa).products;
    if (out == Type::i8) return nullptr;
    if (gate == Op::silu) return products.silu[static_cast<int>(out)];
    return gate == Op::gelu_tanh ? products.gelu_tanh[static_cast<int>(out)] : nullptr;
}

}  // namespace

bool Product::offered(Type in, Type out, const std::string& isa, std::optional<Op> gate) {
    return tiles_of(in, out, isa) != nullptr && (!gate || gate_of(out, isa, gate) != nullptr);
}

Product::Product(Type in, Type out, int64_t words, int64_t outputs, const std::string& isa, std::optional<Op> gate)
    : words_(words),
      outputs_(outputs),
      panel_words_((kHeads[static_cast<int>(in)] + words) * kPanel),
      out_size_(kBytes[static_cast<int>(out)]),
      columns_(gate ? kPanel / 2 : kPanel),
      tiles_(tiles_of(in, out, isa)),
      gate_(gate_of(out, isa, gate)) {
    if (!offered(in, out, isa, gate)) throw std::invalid_argument("product: " + isa + " has none of these types");
    if (words < 1 || outputs < 1) throw std::invalid_argument("product: expected words and outputs");
    if (gate && outputs % kPanel != 0) throw std::invalid_argument("product: expected whole panels for a gate");
}

const char* Product::panel(const Rows& weight, int member, int members) const {
    return weight.data + share(panels(), member, members) * panel_words_ * sizeof(uint32_t);
}

void Product::run(int64_t rows, const Rows& x, const Rows& weight, const Rows& out, int member, int members,
                  const char* next, Beside* beside) const {
    const int64_t last = share(panels(), member + 1, members), tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t ahead = words_ * kLine;  // bytes that a tile fetches
    for (int64_t p = share(panels(), member, members); p < last; ++p) {
        const auto* panel = reinterpret_cast<const uint32_t*>(weight.data) + p * panel_words_;
        const auto* following = p + 1 < last ? reinterpret_cast<const char*>(panel + panel_words_) : next;
        const int columns = static_cast<int>(std::min<int64_t>(kPanel, outputs_ - p * kPanel));
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = share(rows, t, tiles), count = share(rows, t + 1, tiles) - row;
            Tile tile{x.data + row * x.row_bytes,
                      x.row_bytes,
                      panel,
                      words_,
                      out.data + row * out.row_bytes + p * columns_ * out_size_,
                      out.row_bytes,
                      columns,
                      {}};
            if (following != nullptr && (t + 1) * ahead <= panel_words_ * 4) {
                tile.next = {following + t * ahead, following + (t + 1) * ahead};
            } else if (beside != nullptr) {
                tile.next = beside->fetch(ahead);
            }
            multiply(tile, static_cast<int>(count));
        }
        if (beside != nullptr) beside->work();
    }
}

void Product::multiply(Tile& tile, int rows) const {
    if (gate_ == nullptr) return tiles_[rows - 1](tile);
    alignas(kLine) char results[kTileRows * kPanel * sizeof(float)];
    char* const out = std::exchange(tile.out, results);
    const int64_t out_bytes = std::exchange(tile.out_bytes, kPanel * out_size_);
    tiles_[rows - 1](tile);
    gate_(rows, results, out, out_bytes);
}

}  // namespace hpcdecode::ops
