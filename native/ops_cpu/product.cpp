#include "product.h"

#include <stdexcept>
#include <utility>

#include "kernel_api.h"

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
    each_tile(rows, x, weight, member, members, next, beside, [&](Tile& tile, int64_t row, int count, int64_t panel) {
        tile.out = out.data + row * out.row_bytes + panel * columns_ * out_size_;
        tile.out_bytes = out.row_bytes;
        multiply(tile, count);
    });
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
