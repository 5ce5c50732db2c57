#include "product.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include "kernel_api.h"
#include "packed_weights.h"

namespace hpcdecode::ops {
namespace {

constexpr int kHeads[] = {1, 1, 2, 0};    // by type: rows of a panel before the weights
constexpr int64_t kBlockBytes = 1 << 20;  // of rows that are multiplied by panel after panel: half of a core's cache

bool is_float(Type type) { return type == Type::f32 || type == Type::bf16; }

TileKernel tiles_of(Type in, Type out, const std::string& isa) {
    return in == Type::i64 || !is_float(out)
               ? nullptr
               : kernels_for(isa).products.of[static_cast<int>(in)][static_cast<int>(out)];
}

GateKernel gate_of(Type out, const std::string& isa, std::optional<Op> gate) {
    const Products& products = kernels_for(isa).products;
    if (!is_float(out)) return nullptr;
    if (gate == Op::silu) return products.silu[static_cast<int>(out)];
    return gate == Op::gelu_tanh ? products.gelu_tanh[static_cast<int>(out)] : nullptr;
}

FormKernels kernels_of(Type in, const std::string& isa, WeightForm form) {
    if (!is_float(in) || form == WeightForm::plain) return {};
    return kernels_for(isa).forms[static_cast<int>(form)];
}

DirectTiles direct_of(Type in, Type out, const std::string& isa, Form form) {
    if (in != out || !is_float(in)) return {};
    const FormKernels kernels = kernels_of(in, isa, form.weights);
    if (!form.rounded) return kernels.direct[static_cast<int>(in)];
    const TileKernel tile = kernels.rounded.tile[static_cast<int>(in)];
    return {tile, kMostTileRows, tile != nullptr};
}

ExpandKernel expand_of(Type in, const std::string& isa, Form form) {
    return in == Type::bf16 && !form.rounded ? kernels_of(in, isa, form.weights).expand : nullptr;
}

ValuesKernel values_of(Type in, const std::string& isa, Form form) {
    if (form.rounded) return kernels_of(in, isa, form.weights).rounded.values[static_cast<int>(in)];
    return kernels_for(isa).products.values[static_cast<int>(in)];
}

// Returns the bytes of `inputs` as tiles take them.
int64_t bytes_of_values(Type in, const std::string& isa, Form form, int64_t inputs) {
    if (form.rounded) return inputs / kBlockInputs * kernels_of(in, isa, form.weights).rounded.bytes;
    return inputs * kBytes[static_cast<int>(in)] * (values_of(in, isa, form) == nullptr ? 1 : kValueWords);
}

int64_t words_of_panel(Type in, int64_t words, WeightForm form) {
    if (form == WeightForm::plain) return (kHeads[static_cast<int>(in)] + words) * kPanel;
    return kPanel + packed_bytes(form, words * sizeof(uint32_t) / kBytes[static_cast<int>(in)]) / sizeof(uint32_t);
}

}  // namespace

bool Product::offered(Type in, Type out, const std::string& isa, std::optional<Op> gate, Form form) {
    if (tiles_of(in, out, isa) == nullptr || (gate && gate_of(out, isa, gate) == nullptr)) return false;
    if (form.weights == WeightForm::plain || !is_float(in)) return form.weights == WeightForm::plain && !form.rounded;
    return direct_of(in, out, isa, form).always || expand_of(in, isa, form) != nullptr;
}

Product::Product(Type in, Type out, int64_t words, int64_t outputs, const std::string& isa, std::optional<Op> gate,
                 Form form, int64_t heads, std::shared_ptr<const Product> update, int64_t adapters)
    : words_(words),
      outputs_(outputs),
      heads_(heads),
      head_panels_(panels_of(outputs)),
      panel_words_(words_of_panel(in, words, form.weights)),
      out_size_(kBytes[static_cast<int>(out)]),
      columns_(gate ? kPanel / 2 : kPanel),
      tile_rows_(kernels_for(isa).products.rows[static_cast<int>(in)]),
      tiles_(tiles_of(in, out, isa)),
      direct_(direct_of(in, out, isa, form)),
      values_(values_of(in, isa, form)),
      expand_(expand_of(in, isa, form)),
      inputs_(words * static_cast<int64_t>(sizeof(uint32_t)) / kBytes[static_cast<int>(in)]),
      value_bytes_(bytes_of_values(in, isa, form, inputs_)),
      gate_(gate_of(out, isa, gate)),
      update_(std::move(update)),
      adapters_(adapters),
      add_(out == Type::i8 ? nullptr : kernels_for(isa).add[static_cast<int>(out)]) {
    if (!offered(in, out, isa, gate, form)) throw std::invalid_argument("product: " + isa + " has none of these types");
    if (words < 1 || outputs < 1 || heads < 1)
        throw std::invalid_argument("product: expected words, outputs and heads");
    if (gate && heads > 1) throw std::invalid_argument("product: expected one head for a gate");
    if (inputs_ % inputs_multiple(form.weights) != 0)
        throw std::invalid_argument("product: expected a multiple of " + std::to_string(inputs_multiple(form.weights)) +
                                    " inputs for weights of this form");
    if (gate && outputs % kPanel != 0) throw std::invalid_argument("product: expected whole panels for a gate");
    if (update_ != nullptr && (adapters < 1 || heads > 1 || in == Type::i8 || update_->outputs_ != outputs ||
                               update_->out_size_ != out_size_ || update_->gate_ != nullptr || update_->heads_ > 1))
        throw std::invalid_argument("product: expected an update of the same outputs, by one adapter or more");
}

const char* Product::panel(const Rows& weight, int member, int members) const {
    return weight.data + share(panels(), member, members) * panel_words_ * sizeof(uint32_t);
}

int64_t Product::blocks(int64_t rows) const {
    const int64_t most = std::max<int64_t>(kBlockBytes / value_bytes() / tile_rows_ * tile_rows_, kMostTileRows);
    return (rows + most - 1) / most;
}

void Product::run(int64_t rows, const Rows& x, const Rows& weight, const Rows& out, int member, int members,
                  const char* next, Beside* beside) const {
    const auto visit = [&](Tile& tile, int64_t row, int count, int64_t panel) {
        tile.out = out.data + row * out.row_bytes + first_byte(panel);
        tile.out_bytes = out.row_bytes;
        tile.out_apart = columns_ * out_size_;
        multiply(tile, count);
    };
    each_tile<true>(rows, x, weight, own(member, members), next, beside, visit);
}

// Returns the plain panel, in memory of the thread that the next one takes.
const uint32_t* Product::expanded(const uint32_t* panel) const {
    constexpr int64_t kLineWords = kLine / sizeof(uint32_t);
    static thread_local std::vector<uint32_t> memory;
    const size_t needed = (1 + words_) * kPanel + kLineWords;
    if (memory.size() < needed) memory.resize(needed);
    auto* out = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kLine - 1)) / sizeof(uint32_t);
    expand_(reinterpret_cast<const char*>(panel), inputs_, out);
    return out;
}

void Product::multiply(Tile& tile, int rows) const {
    if (gate_ == nullptr) return compute(tile, rows);
    alignas(kLine) char results[kMostTileRows * kPanel * sizeof(float)];
    char* const out = std::exchange(tile.out, results);
    const int64_t out_bytes = std::exchange(tile.out_bytes, kPanel * out_size_);
    const int64_t apart = std::exchange(tile.out_apart, rows * kPanel * out_size_);
    compute(tile, rows);
    for (int i = 0; i < tile.panels; ++i) gate_(rows, results + i * tile.out_apart, out + i * apart, out_bytes);
}

}  // namespace hpcdecode::ops
