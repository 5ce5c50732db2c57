#include "bind_steps.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bind_recurrent.h"
#include "step_layers.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

std::vector<int32_t> read_slots(nb::handle slots) {
    const Ints s = read_ints(slots, "slots");
    return {s.data, s.data + s.size};
}

intptr_t address_of(RowAttention& step) { return reinterpret_cast<intptr_t>(&step); }

void bind_attention(nb::module_& m) {
    nb::class_<StepAttention>(m, "StepAttention", "Attention of new tokens of sequences, for a Chain to call.")
        .def(
            "__init__",
            [](StepAttention* a, KvCache& cache, nb::handle slots, nb::handle counts, const std::string& dtype,
               nb::sequence sinks) {
                std::vector<std::vector<float>> own;
                for (nb::handle each : sinks)
                    own.push_back(each.is_none() ? std::vector<float>() : read_floats(each, "sinks"));
                new (a)
                    StepAttention(cache, read_slots(slots), read_slots(counts), parse_act_type(dtype), std::move(own));
            },
            nb::arg("kv_cache"), nb::arg("slots"), nb::arg("counts"), nb::arg("dtype"), nb::arg("sinks"),
            nb::keep_alive<1, 2>(),
            nb::sig("def __init__(self, kv_cache: KvCache, slots: _Ints, counts: _Ints, dtype: str, sinks: "
                    "collections.abc.Sequence[_Floats | None]) -> None"),
            R"(Prepare a step of sequences that have been extended.

Args:
    kv_cache: The KV cache of the sequences.
    slots: int32 [n], in the order of the rows.
    counts: int32 [n], by how many tokens each has been extended, with a row of each: at least 1, and no more
        where layers choose tokens.
    dtype: float32 or bfloat16, of the rows of qkv and of the output.
    sinks: For every layer float32 [q_heads], or None.)")
        .def_prop_ro(
            "address", [](StepAttention& a) { return address_of(a); }, "Address that Chain.run takes as attention.")
        .def_prop_ro("seconds", &StepAttention::seconds, "Seconds that a thread spent in attention, on average.");
}

void bind_layers(nb::module_& m) {
    nb::class_<StepStates>(m, "StepStates", "One new token per sequence through the states of recurrent layers.")
        .def(
            "__init__",
            [](StepStates* s, StateStore& store, nb::handle slots) { new (s) StepStates(store, read_slots(slots)); },
            nb::arg("store"), nb::arg("slots"), nb::keep_alive<1, 2>(),
            nb::sig("def __init__(self, store: StateStore, slots: _Ints) -> None"),
            R"(Prepare a step of sequences that have been extended by one token each.

Args:
    store: The states of the sequences.
    slots: int32 [n], in the order of the rows.)");

    nb::class_<StepLayers>(m, "StepLayers", "What a decode step does at layers of both kinds, for a Chain to call.")
        .def(
            "__init__",
            [](StepLayers* s, StepAttention* attention, StepStates* states,
               const std::vector<std::pair<bool, int>>& layers) {
                std::vector<StepLayer> all;
                for (const auto& [attends, place] : layers) all.push_back({attends, place});
                new (s) StepLayers(attention, states, std::move(all));
            },
            nb::arg("attention").none(), nb::arg("states").none(), nb::arg("layers"), nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 3>(), R"(Put together a step of layers that attend and layers that keep states.

Args:
    attention: Of the layers that attend, or None.
    states: Of the layers that keep states, for the same slots, or None.
    layers: For every layer whether it attends, and its index among those of its kind.

Raises:
    ValueError: If a layer is of a kind that is None.)")
        .def_prop_ro(
            "address", [](StepLayers& s) { return address_of(s); }, "Address that Chain.run takes as attention.")
        .def_prop_ro("seconds", &StepLayers::seconds, "Seconds that a thread spent at these layers, on average.");
}

}  // namespace

void bind_steps(nb::module_& m) {
    bind_attention(m);
    bind_layers(m);
}

}  // namespace hpcdecode
