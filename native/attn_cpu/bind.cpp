// The Python module hpcdecode._attn_cpu. Only this file and tensor.cpp know nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bandwidth.h"
#include "engine.h"
#include "isa.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace hpcdecode;

namespace {

struct Sequences {
    Ints slots, counts;
};

Sequences read_sequences(nb::handle slots, nb::handle counts) {
    Sequences s{read_ints(slots, "slots"), read_ints(counts, "counts")};
    if (s.slots.size != s.counts.size) {
        throw std::invalid_argument("slots and counts: expected the same length, got " + std::to_string(s.slots.size) +
                                    " and " + std::to_string(s.counts.size));
    }
    return s;
}

void extend(Engine& e, nb::handle slots, nb::handle counts) {
    const Sequences s = read_sequences(slots, counts);
    nb::gil_scoped_release unlocked;
    e.extend(s.slots.data, s.counts.data, s.slots.size);
}

void append(Engine& e, int layer, nb::handle slots, nb::handle counts, nb::handle kv) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix m = read_matrix(kv, "kv", false);
    nb::gil_scoped_release unlocked;
    e.append(layer, s.slots.data, s.counts.data, s.slots.size, m);
}

void attend(Engine& e, int layer, nb::handle slots, nb::handle counts, nb::handle qkv, nb::handle out,
            nb::handle sinks) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix in = read_matrix(qkv, "qkv", false), result = read_matrix(out, "out", true);
    std::vector<float> extra;
    if (!sinks.is_none()) extra = read_floats(sinks, "sinks");
    const float* sink = sinks.is_none() ? nullptr : extra.data();
    nb::gil_scoped_release unlocked;
    e.attend(layer, s.slots.data, s.counts.data, s.slots.size, in, result, sink, static_cast<int64_t>(extra.size()));
}

void release(Engine& e, nb::handle slots) {
    const Ints s = read_ints(slots, "slots");
    nb::gil_scoped_release unlocked;
    e.release(s.data, s.size);
}

int resolve_block_tokens(const std::string& kv_dtype, std::optional<int> block_tokens) {
    return block_tokens ? *block_tokens : default_block_tokens(parse_kv_type(kv_dtype));
}

}  // namespace

NB_MODULE(_attn_cpu, m) {
    nb::exception<CapacityError>(m, "CapacityError", PyExc_RuntimeError);

    nb::class_<LayerShape>(m, "LayerShape")
        .def(
            "__init__",
            [](LayerShape* s, int kv_heads, int k_dim, int v_dim, int q_heads, float scale,
               std::optional<int64_t> window, std::optional<float> softcap, bool sinks) {
                if ((window && *window < 1) || (softcap && !(*softcap > 0))) {
                    throw std::invalid_argument("window and softcap: expected positive values, or None");
                }
                new (s)
                    LayerShape{kv_heads, k_dim, v_dim, q_heads, scale, window.value_or(0), softcap.value_or(0), sinks};
            },
            nb::arg("kv_heads"), nb::arg("k_dim"), nb::arg("v_dim"), nb::arg("q_heads"), nb::arg("scale"),
            nb::arg("window").none(), nb::arg("softcap").none(), nb::arg("sinks"));

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* e, const std::vector<LayerShape>& layers, const std::string& kv_dtype, int64_t capacity_tokens,
               int max_sequences, std::optional<int> block_tokens, int threads, const std::vector<int>& cpus,
               const std::string& isa) {
                new (e) Engine(layers, {parse_kv_type(kv_dtype), capacity_tokens, max_sequences,
                                        resolve_block_tokens(kv_dtype, block_tokens), threads, cpus, isa});
            },
            nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("capacity_tokens"), nb::arg("max_sequences"),
            nb::arg("block_tokens").none(), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"))
        .def("extend", &extend, nb::arg("slots"), nb::arg("counts"))
        .def("append", &append, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("kv"))
        .def("attend", &attend, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("qkv"), nb::arg("out"),
             nb::arg("sinks").none() = nb::none())
        .def("release", &release, nb::arg("slots"))
        .def("fork", &Engine::fork, nb::arg("src"), nb::arg("dst"))
        .def("truncate", &Engine::truncate, nb::arg("slot"), nb::arg("length"))
        .def("length", &Engine::length, nb::arg("slot"))
        .def("check", &Engine::check)
        .def_prop_ro("used_tokens", [](const Engine& e) { return e.store().used_tokens(); })
        .def_prop_ro("capacity_tokens", [](const Engine& e) { return e.store().capacity_tokens(); })
        .def_prop_ro("free_blocks", [](const Engine& e) { return e.store().free_blocks(); })
        .def_prop_ro("block_tokens", [](const Engine& e) { return e.store().block_tokens(); })
        .def_prop_ro("bytes", [](const Engine& e) { return e.store().bytes(); })
        .def_prop_ro("threads", &Engine::threads)
        .def_prop_ro("isa", [](const Engine& e) { return std::string(e.isa()); })
        .def_prop_ro("bytes_read", &Engine::bytes_read)
        .def_prop_ro("attend_seconds", &Engine::attend_seconds);

    m.def("built_isas", &built_isas);
    m.def("untested_isas", &untested_isas);
    m.def("supported_isas", &supported_isas);
    m.def(
        "select_isa", [](const std::string& forced) { return std::string(select_isa(forced).name); },
        nb::arg("forced"));
    m.def(
        "block_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, std::optional<int> block_tokens) {
            const int tokens = resolve_block_tokens(kv_dtype, block_tokens);
            return std::make_pair(bytes_per_block(lay_out(layers, parse_kv_type(kv_dtype), tokens)), tokens);
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens").none(),
        "Bytes of one block over all layers, and its tokens.");
    nb::class_<ReadProbe>(m, "ReadProbe")
        .def(nb::init<size_t, int, const std::vector<int>&, const std::string&>(), nb::arg("bytes"), nb::arg("threads"),
             nb::arg("cpus"), nb::arg("isa"))
        .def("seconds", &ReadProbe::seconds, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("bytes", &ReadProbe::bytes);
}
