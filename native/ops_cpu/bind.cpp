// The Python module hpcdecode._ops_cpu. Only this file knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>

#include "chain.h"
#include "draw.h"
#include "largest.h"
#include "panels.h"

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

std::vector<int64_t> draw_rows(int64_t logits, int64_t row_bytes, Type type, int64_t vocabulary,
                               const std::vector<int64_t>& rows, const std::vector<Draw>& draws, int threads,
                               const std::string& isa) {
    if (rows.size() != draws.size()) throw std::invalid_argument("draw: expected a draw for every row");
    nb::gil_scoped_release unlocked;
    const Rows all{reinterpret_cast<char*>(static_cast<intptr_t>(logits)), row_bytes};
    return draw(all, type, vocabulary, rows, draws, threads, isa);
}

void* at(int64_t place) { return reinterpret_cast<void*>(static_cast<intptr_t>(place)); }

Rows rows_at(const std::pair<int64_t, int64_t>& place) { return {static_cast<char*>(at(place.first)), place.second}; }

using Places = std::array<int64_t, 3>;

double largest(const Largest& self, int64_t rows, const std::pair<int64_t, int64_t>& x,
               const std::pair<int64_t, int64_t>& rounded, const Places& about, const Places& weight, int64_t ids,
               int threads) {
    const auto floats = [](int64_t place) { return static_cast<const float*>(at(place)); };
    const auto& [scales, lost, kept] = about;
    const auto& [exact_weight, rounded_weight, norms] = weight;
    nb::gil_scoped_release unlocked;
    return self.run(rows, {rows_at(x), rows_at(rounded), floats(scales), floats(lost), floats(kept)},
                    {rows_at({exact_weight, 0}), rows_at({rounded_weight, 0}), floats(norms)},
                    static_cast<int64_t*>(at(ids)), threads);
}

void fill(const std::vector<std::array<int64_t, 3>>& parts, const std::vector<int64_t>& heads, int64_t words,
          int64_t in_turn, int64_t out, int threads) {
    std::vector<WeightRows> rows;
    for (const auto& [data, row_bytes, count] : parts)
        rows.push_back({static_cast<const char*>(at(data)), row_bytes, count});
    std::vector<const uint32_t*> firsts;
    for (const int64_t head : heads) firsts.push_back(static_cast<const uint32_t*>(at(head)));
    nb::gil_scoped_release unlocked;
    fill_panels(rows, firsts, words, in_turn, static_cast<uint32_t*>(at(out)), threads);
}

}  // namespace

NB_MODULE(_ops_cpu, m) {
    nb::set_leak_warnings(false);  // objects may live until the interpreter ends
    nb::enum_<Type>(m, "Type").value("float32", Type::f32).value("bfloat16", Type::bf16).value("int8", Type::i8);
    nb::enum_<Op>(m, "Op")
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
        .value("minimum", Op::minimum)
        .value("maximum", Op::maximum)
        .value("sum", Op::sum)
        .value("peak", Op::peak);

    nb::class_<Step>(m, "Step").def(
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
        nb::arg("a_stride"), nb::arg("b").none(), nb::arg("b_stride"), nb::arg("scalar"));

    nb::class_<Program>(m, "Program")
        .def(nb::init<std::vector<Step>, std::vector<Step>, int64_t, int, const std::string&>(), nb::arg("setup"),
             nb::arg("body"), nb::arg("scratch"), nb::arg("tensors"), nb::arg("isa"));

    nb::class_<Product>(m, "Product")
        .def(nb::init<Type, Type, int64_t, int64_t, const std::string&, std::optional<Op>>(), nb::arg("x"),
             nb::arg("y"), nb::arg("words"), nb::arg("outputs"), nb::arg("isa"), nb::arg("gate") = nb::none())
        .def_static("offered", &Product::offered, nb::arg("x"), nb::arg("y"), nb::arg("isa"),
                    nb::arg("gate") = nb::none());

    nb::class_<Largest>(m, "Largest")
        .def(nb::init<Type, Type, int64_t, int64_t, const std::string&>(), nb::arg("x"), nb::arg("y"), nb::arg("words"),
             nb::arg("outputs"), nb::arg("isa"))
        .def_static("offered", &Largest::offered, nb::arg("x"), nb::arg("y"), nb::arg("isa"))
        .def("run", &largest, nb::arg("rows"), nb::arg("x"), nb::arg("rounded"), nb::arg("about"), nb::arg("weight"),
             nb::arg("ids"), nb::arg("threads"));

    m.def("fill_panels", &fill, nb::arg("parts"), nb::arg("heads"), nb::arg("words"), nb::arg("in_turn"),
          nb::arg("out"), nb::arg("threads"));

    nb::class_<Attention>(m, "Attention").def(nb::init<int>(), nb::arg("layer"));

    nb::class_<Chain>(m, "Chain")
        .def(
            "__init__",
            [](Chain* c,
               const std::vector<std::pair<std::variant<Program, Product, Attention>, std::vector<int>>>& stages,
               int given, const std::vector<std::pair<int64_t, int64_t>>& passed) {
                std::vector<Stage> made;
                for (const auto& [work, tensors] : stages) made.push_back({work, tensors});
                std::vector<Passed> rows;
                for (const auto& [bytes, at] : passed) rows.push_back({bytes, at});
                new (c) Chain(std::move(made), given, std::move(rows));
            },
            nb::arg("stages"), nb::arg("given"), nb::arg("passed"))
        .def("run", &run, nb::arg("tokens"), nb::arg("threads"), nb::arg("pointers"), nb::arg("row_bytes"),
             nb::arg("attention") = 0)
        .def_prop_ro("tensors", &Chain::given);

    nb::class_<Draw>(m, "Draw").def(
        "__init__",
        [](Draw* d, float temperature, float min_p, int64_t top_k, float top_p, double uniform) {
            new (d) Draw{temperature, min_p, top_k, top_p, uniform};
        },
        nb::arg("temperature"), nb::arg("min_p"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("uniform"));
    m.def("draw", &draw_rows, nb::arg("logits"), nb::arg("row_bytes"), nb::arg("type"), nb::arg("vocabulary"),
          nb::arg("rows"), nb::arg("draws"), nb::arg("threads"), nb::arg("isa"));
}
