#include "bind_products.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>

#include "adapters.h"
#include "argmax.h"
#include "blocks.h"
#include "expert_product.h"
#include "packed_weights.h"
#include "quantise.h"

namespace nb = nanobind;

namespace hpcdecode::ops {
namespace {

void* at(int64_t place) { return reinterpret_cast<void*>(static_cast<intptr_t>(place)); }

Rows rows_at(const std::pair<int64_t, int64_t>& place) { return {static_cast<char*>(at(place.first)), place.second}; }

using Places = std::array<int64_t, 3>;

double argmax(const Argmax& self, int64_t rows, const std::pair<int64_t, int64_t>& x,
              const std::pair<int64_t, int64_t>& rounded, const Places& about, const Places& weight, int64_t ids,
              int64_t values, int threads) {
    const auto floats = [](int64_t place) { return static_cast<const float*>(at(place)); };
    const auto& [scales, lost, kept] = about;
    const auto& [exact_weight, rounded_weight, norms] = weight;
    nb::gil_scoped_release unlocked;
    return self.run(rows, {rows_at(x), rows_at(rounded), floats(scales), floats(lost), floats(kept)},
                    {rows_at({exact_weight, 0}), rows_at({rounded_weight, 0}), floats(norms)},
                    static_cast<int64_t*>(at(ids)), static_cast<float*>(at(values)), threads);
}

void pack(const std::vector<std::array<int64_t, 3>>& parts, const std::vector<int64_t>& heads, int64_t words,
          int64_t in_turn, int64_t out, int threads) {
    std::vector<WeightRows> rows;
    for (const auto& [data, row_bytes, count] : parts)
        rows.push_back({static_cast<const char*>(at(data)), row_bytes, count});
    std::vector<const uint32_t*> firsts;
    for (const int64_t head : heads) firsts.push_back(static_cast<const uint32_t*>(at(head)));
    nb::gil_scoped_release unlocked;
    pack_weights(rows, firsts, words, in_turn, static_cast<uint32_t*>(at(out)), threads);
}

void pack_bits(const std::vector<std::array<int64_t, 3>>& parts, Type type, int64_t inputs, int64_t in_turn,
               int64_t bias, WeightForm form, int64_t out, int threads) {
    if (type == Type::i8 || form == WeightForm::plain || inputs % kBlockInputs != 0)
        throw std::invalid_argument("pack_few_bits: expected float32 or bfloat16, and a multiple of 32 inputs");
    std::vector<WeightRows> rows;
    for (const auto& [data, row_bytes, count] : parts)
        rows.push_back({static_cast<const char*>(at(data)), row_bytes, count});
    nb::gil_scoped_release unlocked;
    pack_few_bits({rows_of(rows, in_turn), type, inputs, form}, static_cast<const float*>(at(bias)),
                  static_cast<char*>(at(out)), threads);
}

void pack_in_blocks(const std::vector<std::array<int64_t, 3>>& parts, BlockType type, int64_t inputs, int64_t in_turn,
                    int64_t bias, int64_t out, int threads) {
    if (inputs % inputs_multiple(form_of(type)) != 0)
        throw std::invalid_argument("pack_blocks: expected whole blocks in a row");
    std::vector<WeightRows> rows;
    for (const auto& [data, row_bytes, count] : parts)
        rows.push_back({static_cast<const char*>(at(data)), row_bytes, count});
    nb::gil_scoped_release unlocked;
    pack_blocks({rows_of(rows, in_turn), inputs, type}, static_cast<const float*>(at(bias)),
                static_cast<char*>(at(out)), threads);
}

}  // namespace

void bind_products(nb::module_& m) {
    nb::class_<Product>(m, "Product", "A GEMM of activations by packed weights, y = x @ weight.T.")
        .def(
            "__init__",
            [](Product* p, Type x, Type y, int64_t words, int64_t outputs, const std::string& isa,
               std::optional<Op> gate, WeightForm form, bool rounded, int64_t heads, const Product* update,
               int64_t adapters) {
                auto own = update == nullptr ? nullptr : std::make_shared<const Product>(*update);
                new (p) Product(x, y, words, outputs, isa, gate, {form, rounded}, heads, std::move(own), adapters);
            },
            nb::arg("x"), nb::arg("y"), nb::arg("words"), nb::arg("outputs"), nb::arg("isa"),
            nb::arg("gate") = nb::none(), nb::arg("form") = WeightForm::plain, nb::arg("rounded") = false,
            nb::arg("heads") = 1, nb::arg("update").none() = nb::none(), nb::arg("adapters") = 0,
            R"(Describe a GEMM.

Args:
    x: Type of the activations, [tokens, 4 * words bytes].
    y: Type of the result, [tokens, outputs].
    words: Words of 4 bytes in a row of x.
    outputs: Rows of the weight.
    isa: Instruction set to use.
    gate: silu or gelu_tanh, or None. With a gate y has half as many outputs: of each group of 32 outputs,
        the gate of the first half times the second half.
    form: Form of the weights. But for plain, the inputs must be a multiple of 32.
    rounded: Round rows of x to int8, with a scale for 32 inputs.
    heads: With several, a row of x has `words` of each head, and a row of y `outputs` of each. Groups of 32
        outputs are of one head.
    update: GEMM of h to the same outputs, by which adapters update them before the gate (LoRA), or None.
    adapters: Number of adapters.

Raises:
    ValueError: If the instruction set lacks these types, outputs with a gate is no multiple of 32, or the
        update does not fit.)")
        .def_static(
            "offered",
            [](Type x, Type y, const std::string& isa, std::optional<Op> gate, WeightForm form, bool rounded) {
                return Product::offered(x, y, isa, gate, {form, rounded});
            },
            nb::arg("x"), nb::arg("y"), nb::arg("isa"), nb::arg("gate") = nb::none(),
            nb::arg("form") = WeightForm::plain, nb::arg("rounded") = false,
            "Return True if the instruction set has GEMMs of these types and weights of this form.");

    nb::class_<AdapterProduct>(m, "AdapterProduct", R"(The GEMMs h = A x of adapters (LoRA), as a stage of a Chain.

Every row is multiplied by the packed weight of its adapter; rows without one are left out.)")
        .def(nb::init<const Product&, int64_t>(), nb::arg("product"), nb::arg("adapters"), R"(Describe the GEMMs.

Args:
    product: The GEMM of one adapter.
    adapters: Number of adapters, whose packed weights follow on each other.

Raises:
    ValueError: If there are no adapters, or product has several heads, a gate or an update.)");

    nb::class_<AdapterSum>(m, "AdapterSum", R"(The sums y + B h of adapters (LoRA), as a stage of a Chain.

Rows without an adapter are copied.)")
        .def(nb::init<const Product&, int64_t>(), nb::arg("product"), nb::arg("adapters"), R"(Describe the sums.

Args:
    product: The GEMM B h of one adapter.
    adapters: Number of adapters, whose packed weights follow on each other.

Raises:
    ValueError: If there are no adapters, or product has several heads, a gate or an update.)");

    nb::class_<ExpertProduct>(m, "ExpertProduct", R"(GEMMs of rows by packed weights of experts.

Every row is multiplied by the weight of the expert that was chosen for it, or by that which its token's adapter
(LoRA) has for the expert.)")
        .def(nb::init<const Product&, int64_t, int64_t, int64_t, bool, int64_t>(), nb::arg("product"),
             nb::arg("experts"), nb::arg("first"), nb::arg("choices"), nb::arg("shared"), nb::arg("adapters") = 0,
             R"(Describe the GEMMs.

Args:
    product: The GEMM of one expert. Its update is by the experts of all adapters.
    experts: Number of experts, whose packed weights follow on each other.
    first: Number of the first of them. Rows of others become zeros.
    choices: Experts that are chosen for a token, each of which has a row of the result.
    shared: A token has one row of activations for all of them, not one for each.
    adapters: Number of adapters, each of which has weights of all experts; 0 for weights of the experts.

Raises:
    ValueError: If there are no experts or choices, or product has several heads.)");

    nb::class_<Argmax>(m, "Argmax", R"(The argmax of a GEMM's outputs for every row, without most of its sums.

An int8 GEMM bounds every output; only outputs that may be a row's largest are computed exactly.)")
        .def(nb::init<Type, Type, int64_t, int64_t, const std::string&>(), nb::arg("x"), nb::arg("y"), nb::arg("words"),
             nb::arg("outputs"), nb::arg("isa"), R"(Describe the GEMM, as for Product.

Raises:
    ValueError: If the instruction set lacks these types.)")
        .def_static("offered", &Argmax::offered, nb::arg("x"), nb::arg("y"), nb::arg("isa"),
                    "Return True if the instruction set has the exact and the int8 GEMM.")
        .def("run", &argmax, nb::arg("rows"), nb::arg("x"), nb::arg("rounded"), nb::arg("about"), nb::arg("weight"),
             nb::arg("ids"), nb::arg("values"), nb::arg("threads"), R"(Write the first of each row's largest outputs.

Args:
    rows: Number of rows.
    x: (address, bytes from row to row) of the activations.
    rounded: The same of the activations as int8.
    about: Addresses of three float32 [rows]: scales of rounded, norms of x - rounded, norms of rounded.
    weight: Addresses of the packed weights, of the same as int8, and of their norms, float32 [groups, 2, 32].
    ids: Address of the result, int64 [rows].
    values: Address of those outputs, float32 [rows].
    threads: Number of OpenMP threads.

Returns:
    The share of all outputs that were computed exactly.)");

    m.def("pack_weights", &pack, nb::arg("parts"), nb::arg("heads"), nb::arg("words"), nb::arg("in_turn"),
          nb::arg("out"), nb::arg("threads"), R"(Pack the rows of a weight in groups of 32 outputs.

Args:
    parts: For every part of the weight (address, bytes from row to row, rows).
    heads: Addresses of arrays of one word per output, which groups begin with.
    words: Words of 4 bytes in a row.
    in_turn: Rows that each part gives before the next part does.
    out: Address of the result, int32 [groups, heads + words, 32], zeros so far.
    threads: Number of OpenMP threads.)");

    m.def("pack_few_bits", &pack_bits, nb::arg("parts"), nb::arg("type"), nb::arg("inputs"), nb::arg("in_turn"),
          nb::arg("bias"), nb::arg("form"), nb::arg("out"), nb::arg("threads"),
          R"(Round the numbers of a weight to few bits, and pack it in groups of 32 outputs.

Args:
    parts: For every part of the weight (address, bytes from row to row, rows).
    type: Type of the numbers, float32 or bfloat16.
    inputs: Numbers in a row, a multiple of 32.
    in_turn: Rows that each part gives before the next part does.
    bias: Address of float32 [outputs], which groups begin with.
    form: Form of the result.
    out: Address of the result, zeros so far.
    threads: Number of OpenMP threads.)");

    m.def("pack_blocks", &pack_in_blocks, nb::arg("parts"), nb::arg("type"), nb::arg("inputs"), nb::arg("in_turn"),
          nb::arg("bias"), nb::arg("out"), nb::arg("threads"),
          R"(Pack the rows of a weight that are blocks in groups of 32 outputs, with the same numbers.

Args:
    parts: For every part of the weight (address, bytes from row to row, rows).
    type: Type of the blocks.
    inputs: Numbers in a row, whole blocks of them.
    in_turn: Rows that each part gives before the next part does.
    bias: Address of float32 [outputs], which groups begin with.
    out: Address of the result, zeros so far.
    threads: Number of OpenMP threads.)");
}

}  // namespace hpcdecode::ops
