// The Python module hpcdecode._attn_cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bandwidth.h"
#include "engine.h"
#include "isa.h"
#include "prefill.h"
#include "step_attention.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace hpcdecode;

namespace {

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

void attend_prompts(Prefill& p, int layer, nb::list packed, nb::handle starts, nb::handle counts, nb::handle q,
                    nb::handle k, nb::handle v, nb::handle out, nb::handle sinks, nb::handle unread) {
    const Ints begin = read_ints(starts, "starts"), n = read_ints(counts, "counts");
    const Ints first = unread.is_none() ? Ints{} : read_ints(unread, "unread");
    if (!unread.is_none() && first.size != n.size) {
        throw std::invalid_argument("unread: expected " + std::to_string(n.size) + ", got " +
                                    std::to_string(first.size));
    }
    if (begin.size != n.size || static_cast<size_t>(n.size) != packed.size()) {
        throw std::invalid_argument("packed, starts and counts: expected the same length, got " +
                                    std::to_string(packed.size()) + ", " + std::to_string(begin.size) + " and " +
                                    std::to_string(n.size));
    }
    std::vector<PromptChunk> chunks;
    for (int i = 0; i < n.size; ++i) {
        const Bytes b = read_bytes(packed[i], "packed");
        chunks.push_back({b.data, b.size, begin.data[i], n.data[i], unread.is_none() ? 0 : first.data[i]});
    }
    const Matrix queries = read_matrix(q, "q", false), keys = read_matrix(k, "k", false),
                 values = read_matrix(v, "v", false), result = read_matrix(out, "out", true);
    std::vector<float> extra;
    if (!sinks.is_none()) extra = read_floats(sinks, "sinks");
    const float* sink = sinks.is_none() ? nullptr : extra.data();
    nb::gil_scoped_release unlocked;
    p.attend(layer, chunks, queries, keys, values, result, sink, static_cast<int64_t>(extra.size()));
}

ActType parse_act_type(const std::string& dtype) {
    if (dtype == "float32") return ActType::kF32;
    if (dtype == "bfloat16") return ActType::kBF16;
    throw std::invalid_argument("dtype: expected float32 or bfloat16, got '" + dtype + "'");
}

void release(Engine& e, nb::handle slots) {
    const Ints s = read_ints(slots, "slots");
    nb::gil_scoped_release unlocked;
    e.release(s.data, s.size);
}

}  // namespace

NB_MODULE(_attn_cpu, m) {
    bind_common(m);

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* e, const std::vector<LayerShape>& layers, const std::string& kv_dtype, int64_t capacity_tokens,
               int max_sequences, std::optional<int> block_tokens, int threads, const std::vector<int>& cpus,
               const std::string& isa, const std::vector<int>& nodes, bool team) {
                new (e) Engine(layers, {parse_kv_type(kv_dtype), capacity_tokens, max_sequences,
                                        block_tokens.value_or(kDefaultBlockTokens), threads, cpus, isa, nodes, team});
            },
            nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("capacity_tokens"), nb::arg("max_sequences"),
            nb::arg("block_tokens").none(), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"), nb::arg("nodes"),
            nb::arg("team"))
        .def("extend", &extend, nb::arg("slots"), nb::arg("counts"))
        .def("append", &append, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("kv"))
        .def("attend", &attend, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("qkv"), nb::arg("out"),
             nb::arg("sinks").none() = nb::none())
        .def("release", &release, nb::arg("slots"))
        .def("fork", &Engine::fork, nb::arg("src"), nb::arg("dst"))
        .def("truncate", &Engine::truncate, nb::arg("slot"), nb::arg("length"))
        .def("length", &Engine::length, nb::arg("slot"))
        .def("check", &Engine::check)
        .def("read_seconds", &Engine::read_seconds, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("used_tokens", [](const Engine& e) { return e.store().used_tokens(); })
        .def_prop_ro("capacity_tokens", [](const Engine& e) { return e.store().capacity_tokens(); })
        .def_prop_ro("free_blocks", [](const Engine& e) { return e.store().free_blocks(); })
        .def_prop_ro("node_free_blocks",
                     [](const Engine& e) {
                         std::vector<int64_t> free;
                         for (int i = 0; i < e.store().nodes(); ++i) free.push_back(e.store().free_blocks(i));
                         return free;
                     })
        .def_prop_ro("block_tokens", [](const Engine& e) { return e.store().block_tokens(); })
        .def_prop_ro("bytes", [](const Engine& e) { return e.store().bytes(); })
        .def_prop_ro("threads", &Engine::threads)
        .def_prop_ro("isa", [](const Engine& e) { return std::string(e.isa()); })
        .def_prop_ro("bytes_read", &Engine::bytes_read)
        .def_prop_ro("attend_seconds", &Engine::attend_seconds);

    nb::class_<StepAttention>(m, "StepAttention")
        .def(
            "__init__",
            [](StepAttention* a, Engine& engine, nb::handle slots, const std::string& dtype, nb::list sinks) {
                const Ints s = read_ints(slots, "slots");
                std::vector<std::vector<float>> own;
                for (nb::handle each : sinks)
                    own.push_back(each.is_none() ? std::vector<float>() : read_floats(each, "sinks"));
                const std::vector<int32_t> all(s.data, s.data + s.size);
                new (a) StepAttention(engine, all, parse_act_type(dtype), std::move(own));
            },
            nb::arg("engine"), nb::arg("slots"), nb::arg("dtype"), nb::arg("sinks"), nb::keep_alive<1, 2>())
        .def_prop_ro("address",
                     [](StepAttention& a) { return reinterpret_cast<intptr_t>(static_cast<RowAttention*>(&a)); })
        .def_prop_ro("seconds", &StepAttention::seconds);

    nb::class_<Prefill>(m, "Prefill")
        .def(
            "__init__",
            [](Prefill* p, const std::vector<LayerShape>& layers, const std::string& dtype, int threads,
               const std::vector<int>& cpus, const std::string& isa, const Engine* beside) {
                auto workers = beside ? beside->workers() : make_workers(true, threads, cpus);
                new (p) Prefill(layers, parse_act_type(dtype), std::move(workers), isa);
            },
            nb::arg("layers"), nb::arg("dtype"), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"),
            nb::arg("beside").none())
        .def("packed_bytes", &Prefill::packed_bytes, nb::arg("layer"), nb::arg("tokens"))
        .def("attend", &attend_prompts, nb::arg("layer"), nb::arg("packed"), nb::arg("starts"), nb::arg("counts"),
             nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("sinks").none() = nb::none(),
             nb::arg("unread").none() = nb::none())
        .def_prop_ro("isa", [](const Prefill& p) { return std::string(p.isa()); })
        .def_prop_ro("threads", &Prefill::threads);

    m.def("built_isas", &built_isas);
    m.def("untested_isas", &untested_isas);
    m.def("supported_isas", &supported_isas);
    m.def(
        "select_isa", [](const std::string& forced) { return std::string(select_isa(forced).name); },
        nb::arg("forced"));
    m.def(
        "block_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, std::optional<int> block_tokens) {
            const int tokens = block_tokens.value_or(kDefaultBlockTokens);
            return std::make_pair(bytes_per_block(lay_out(layers, parse_kv_type(kv_dtype), tokens)), tokens);
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens").none(),
        "Bytes of one block over all layers, and its tokens.");
    nb::class_<ReadProbe>(m, "ReadProbe")
        .def(nb::init<size_t, int, const std::vector<int>&, const std::string&, const std::vector<int>&>(),
             nb::arg("bytes"), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"),
             nb::arg("nodes") = std::vector<int>())
        .def("seconds", &ReadProbe::seconds, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("bytes", &ReadProbe::bytes)
        .def_prop_ro("address", [](const ReadProbe& p) { return reinterpret_cast<uintptr_t>(p.data()); });
}
