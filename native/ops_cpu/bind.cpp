// The Python module hpcdecode._ops_cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <tuple>

#include "bind_drafts.h"
#include "bind_draws.h"
#include "bind_forms.h"
#include "bind_products.h"
#include "chain.h"
#include "row_copies.h"

namespace nb = nanobind;
using namespace hpcdecode::ops;

namespace {

using Dims = std::array<int64_t, 3>;

View view_of(int64_t at, const Dims& stride) { return {at, {stride[0], stride[1], stride[2]}}; }

void run(const Chain& chain, int64_t tokens, int threads, const std::vector<int64_t>& pointers,
         const std::vector<int64_t>& row_bytes, int64_t attention) {
    if (pointers.size() != row_bytes.size() || static_cast<int>(pointers.size()) != chain.given()) {
        throw std::invalid_argument("run: expected " + std::to_string(chain.given()) + " tensors, got " +
                                    std::to_string(pointers.size()));
    }
    std::vector<Rows> rows;
    rows.reserve(pointers.size());
    for (size_t i = 0; i < pointers.size(); ++i)
        rows.push_back({reinterpret_cast<char*>(static_cast<intptr_t>(pointers[i])), row_bytes[i]});
    nb::gil_scoped_release unlocked;
    chain.run(tokens, threads, rows, reinterpret_cast<hpcdecode::RowAttention*>(static_cast<intptr_t>(attention)));
}

using Strides = std::vector<std::vector<int64_t>>;

// Returns the matrices at these addresses, or nothing if columns of one do not follow each other.
std::vector<Rows> matrices_of(const RowCopies& copies, const std::vector<int64_t>& pointers, const Strides& strides,
                              int64_t element) {
    if (pointers.size() != copies.matrices() || strides.size() != copies.matrices()) {
        throw std::invalid_argument("rows: expected " + std::to_string(copies.matrices()) + " matrices, got " +
                                    std::to_string(pointers.size()));
    }
    std::vector<Rows> found;
    found.reserve(pointers.size());
    for (size_t i = 0; i < pointers.size(); ++i) {
        if (strides[i].size() != 2 || strides[i][1] != 1) return {};
        found.push_back({reinterpret_cast<char*>(static_cast<intptr_t>(pointers[i])), strides[i][0] * element});
    }
    return found;
}

}  // namespace

NB_MODULE(_ops_cpu, m) {
    m.doc() = "What an S-rank computes on CPUs besides attention: GEMMs, fused element-wise kernels, sampling, drafts.";
    nb::set_leak_warnings(false);  // objects may live until the interpreter ends
    nb::enum_<Type>(m, "Type", "The type of numbers in memory.")
        .value("float32", Type::f32)
        .value("bfloat16", Type::bf16)
        .value("int8", Type::i8)
        .value("int64", Type::i64);
    nb::enum_<Op>(m, "Op", "The operation of a Step.")
        .value("load", Op::load)
        .value("store", Op::store)
        .value("copy", Op::copy)
        .value("neg", Op::neg)
        .value("add", Op::add)
        .value("sub", Op::sub)
        .value("mul", Op::mul)
        .value("div", Op::div)
        .value("sqrt", Op::sqrt)
        .value("rsqrt", Op::rsqrt)
        .value("reciprocal", Op::reciprocal)
        .value("exp", Op::exp)
        .value("tanh", Op::tanh)
        .value("sigmoid", Op::sigmoid)
        .value("silu", Op::silu)
        .value("gelu", Op::gelu)
        .value("gelu_tanh", Op::gelu_tanh)
        .value("relu", Op::relu)
        .value("softplus", Op::softplus)
        .value("minimum", Op::minimum)
        .value("maximum", Op::maximum)
        .value("sum", Op::sum)
        .value("peak", Op::peak)
        .value("rotate", Op::rotate)
        .value("most", Op::most)
        .value("top", Op::top)
        .value("pick", Op::pick)
        .value("mark", Op::mark)
        .value("fill", Op::fill);

    bind_drafts(m);
    bind_draws(m);
    bind_forms(m);

    nb::class_<Step>(m, "Step", "One element-wise operation of a fused kernel.")
        .def(
            "__init__",
            [](Step* s, Op op, Type type, const Dims& dims, int64_t out, const Dims& out_stride, int64_t a,
               const Dims& a_stride, std::optional<int64_t> b, const Dims& b_stride, float scalar) {
                new (s) Step{op,
                             type,
                             {dims[0], dims[1], dims[2]},
                             view_of(out, out_stride),
                             view_of(a, a_stride),
                             view_of(b.value_or(0), b_stride),
                             b.has_value(),
                             scalar};
            },
            nb::arg("op"), nb::arg("type"), nb::arg("dims"), nb::arg("out"), nb::arg("out_stride"), nb::arg("a"),
            nb::arg("a_stride"), nb::arg("b").none(), nb::arg("b_stride"), nb::arg("scalar"),
            R"(Describe out[i][j][k] = op(a[i][j][k], b[i][j][k] or scalar) on float32 scratch memory.

For a load, a is the number of a tensor and a_stride[0] its first element to read; for a store, the same of out.

Args:
    op: Operation; sum, peak and most reduce the last of dims and multiply by scalar. top, pick and mark read
        rows of a of scalar numbers. fill puts scalar where b is not 0.
    type: Type that results are rounded to; for load and store that of the tensor.
    dims: Three sizes.
    out: First float of the result.
    out_stride: Three strides of the result, in floats.
    a: First float of the first operand.
    a_stride: Three strides of the first operand, in floats.
    b: First float of the second operand, or None for scalar.
    b_stride: Three strides of the second operand, in floats.
    scalar: Second operand if b is None.)");

    nb::class_<FusedKernel>(m, "FusedKernel",
                            "A fused element-wise kernel, run token by token on values that stay in cache.")
        .def(nb::init<std::vector<Step>, std::vector<Step>, int64_t, int, const std::string&>(), nb::arg("setup"),
             nb::arg("body"), nb::arg("scratch"), nb::arg("tensors"), nb::arg("isa"), R"(Check and keep the steps.

Args:
    setup: Steps that run once a thread.
    body: Steps that run once a token.
    scratch: Floats of a thread's scratch memory.
    tensors: Number of tensors of a call.
    isa: Instruction set to use.

Raises:
    ValueError: If a step leaves the scratch memory or the tensors, or isa is unknown.)");

    bind_products(m);

    nb::class_<Attention>(m, "Attention", "The attention of a layer, as a stage of a Chain.")
        .def(nb::init<int>(), nb::arg("layer"), "Name the layer.");

    nb::class_<Chain>(m, "Chain", R"(Stages that run one after the other on a block of tokens at a time.

What a block hands from stage to stage stays in cache.)")
        .def(
            "__init__",
            [](Chain* c,
               const std::vector<
                   std::pair<std::variant<FusedKernel, Product, ExpertProduct, AdapterProduct, AdapterSum, Attention>,
                             std::vector<int>>>& stages,
               int given, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& passed) {
                std::vector<Stage> made;
                for (const auto& [work, tensors] : stages) made.push_back({work, tensors});
                std::vector<Passed> rows;
                for (const auto& [bytes, at, inside] : passed) rows.push_back({bytes, at, inside});
                new (c) Chain(std::move(made), given, std::move(rows));
            },
            nb::arg("stages"), nb::arg("given"), nb::arg("passed"), R"(Check and keep the stages.

Args:
    stages: Pairs of work and the numbers of its tensors: (x, weight, y) of a GEMM, (x, weight, adapters, h, B,
        y) of one with an update, (x, experts, weight, y) of one of experts, (x, experts, weight, adapters, y)
        of one of adapters' experts, (x, experts, weight, adapters, h, B, y) of one of experts with an update,
        (adapters, x, A, h) of an AdapterProduct, (adapters, y, h, B, sum) of an AdapterSum, (qkv, out) of an
        attention, or those that the steps of a fused kernel name.
    given: Number of tensors of a call; the passed ones are numbered after them.
    passed: For every tensor that stages hand on, the bytes of its rows, where they begin in a block's memory,
        and where it begins in a row, which several tensors may share.

Raises:
    ValueError: If stages do not fit together.)")
        .def("run", &run, nb::arg("tokens"), nb::arg("threads"), nb::arg("pointers"), nb::arg("row_bytes"),
             nb::arg("attention") = 0, R"(Run all stages on some tokens.

Args:
    tokens: Number of tokens.
    threads: Number of OpenMP threads.
    pointers: Address of every given tensor.
    row_bytes: Bytes from one token's row to the next of every given tensor, 0 for a weight.
    attention: Address of the step's attention, or 0 for a chain without.)")
        .def("together", &Chain::together, nb::arg("tokens"), nb::arg("threads"),
             "Return whether so many tokens go through as one block, as those must of which a sequence has several.")
        .def_prop_ro("tensors", &Chain::given, "Number of tensors of a call.");

    nb::class_<RowCopies>(m, "RowCopies", "Copies of a few rows of matrices side by side into memory, and back.")
        .def(
            "__init__",
            [](RowCopies* copies, std::vector<int64_t> rows, int64_t packed, int64_t row_bytes,
               std::vector<int64_t> widths) {
                const Rows memory{reinterpret_cast<char*>(static_cast<intptr_t>(packed)), row_bytes};
                new (copies) RowCopies(std::move(rows), memory, std::move(widths));
            },
            nb::arg("rows"), nb::arg("packed"), nb::arg("row_bytes"), nb::arg("widths"), R"(Keep what is copied.

Args:
    rows: Index of the row of every matrix, for each packed row.
    packed: Address of the packed rows.
    row_bytes: Bytes from one packed row to the next.
    widths: Bytes of a row of each matrix.)")
        .def(
            "gather",
            [](const RowCopies& copies, const std::vector<int64_t>& pointers, const Strides& strides, int64_t element) {
                const auto matrices = matrices_of(copies, pointers, strides, element);
                copies.gather(matrices);
                return !matrices.empty();
            },
            nb::arg("pointers"), nb::arg("strides"), nb::arg("element"), R"(Pack the rows of matrices.

Args:
    pointers: Address of every matrix.
    strides: Elements from row to row and from column to column of every matrix.
    element: Bytes of an element.

Returns:
    Whether it was done; not if the columns of a matrix do not follow each other.)")
        .def(
            "scatter",
            [](const RowCopies& copies, const std::vector<int64_t>& pointers, const Strides& strides, int64_t element) {
                const auto matrices = matrices_of(copies, pointers, strides, element);
                copies.scatter(matrices);
                return !matrices.empty();
            },
            nb::arg("pointers"), nb::arg("strides"), nb::arg("element"),
            "Write the packed rows to those of matrices; takes and returns what `gather` does.");
}
