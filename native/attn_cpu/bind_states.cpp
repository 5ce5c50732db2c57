#include "bind_states.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "bind_recurrent.h"
#include "isa.h"
#include "state_store.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

std::vector<float> optional_floats(nb::handle h, const char* name) {
    return h.is_none() ? std::vector<float>() : read_floats(h, name);
}

// Returns float32 [channels, taps] in order.
std::vector<float> read_taps(nb::handle h, const RecurrentShape& shape) {
    if (h.is_none()) return {};
    const Matrix m = read_matrix(h, "conv_weight", false);
    if (m.type != ActType::kF32) throw nb::type_error("conv_weight: expected float32, got bfloat16");
    check_size("conv_weight", m, shape.channels(), shape.taps);
    std::vector<float> out;
    out.reserve(m.rows * m.columns);
    for (int64_t i = 0; i < m.rows; ++i) {
        const float* row = static_cast<const float*>(m.data) + i * m.stride;
        out.insert(out.end(), row, row + m.columns);
    }
    return out;
}

std::vector<RecurrentWeights> read_weights(nb::sequence weights, const std::vector<RecurrentShape>& layers) {
    if (nb::len(weights) != layers.size())
        throw std::invalid_argument("weights: expected those of " + std::to_string(layers.size()) + " layers, got " +
                                    std::to_string(nb::len(weights)));
    std::vector<RecurrentWeights> out;
    for (size_t i = 0; i < layers.size(); ++i) {
        const nb::sequence w = nb::cast<nb::sequence>(weights[i]);
        if (nb::len(w) != 4)
            throw std::invalid_argument("weights: expected (conv_weight, conv_bias, rate, skip) of a layer, got " +
                                        std::to_string(nb::len(w)) + " values");
        out.push_back({read_taps(w[0], layers[i]), optional_floats(w[1], "conv_bias"), optional_floats(w[2], "rate"),
                       optional_floats(w[3], "skip")});
    }
    return out;
}

void extend(StateStore& s, nb::handle slots, nb::handle counts) {
    const Sequences q = read_sequences(slots, counts);
    nb::gil_scoped_release unlocked;
    s.extend(q.slots.data, q.counts.data, q.slots.size);
}

void run(StateStore& s, int layer, nb::handle slots, nb::handle counts, nb::handle rows, nb::handle out) {
    const Sequences q = read_sequences(slots, counts);
    const Matrix in = read_matrix(rows, "rows", false), result = read_matrix(out, "out", true);
    nb::gil_scoped_release unlocked;
    s.run(layer, q.slots.data, q.counts.data, q.slots.size, in, result);
}

void release(StateStore& s, nb::handle slots) {
    const Ints q = read_ints(slots, "slots");
    nb::gil_scoped_release unlocked;
    s.release(q.data, q.size);
}

void bind_store(nb::module_& m) {
    nb::class_<StateStore>(m, "StateStore", R"(The recurrent states of sequences in this machine's memory.

A slot is a small int that the caller chooses for a sequence. Calls exclude each other and release the GIL.
Bad arguments raise ValueError or TypeError before anything changes.)")
        .def(
            "__init__",
            [](StateStore* s, const std::vector<RecurrentShape>& layers, nb::sequence weights, const std::string& dtype,
               const std::string& state_dtype, int max_sequences, int threads, const std::vector<int>& cpus,
               const std::string& isa, const std::vector<int>& nodes, bool team, const KvCache* beside, int lookahead) {
                const StateTypes types{parse_act_type(dtype), parse_act_type(state_dtype)};
                new (s) StateStore(layers, read_weights(weights, layers),
                                   {types, max_sequences, threads, cpus, isa, nodes, team, beside, lookahead});
            },
            nb::arg("layers"), nb::arg("weights"), nb::arg("dtype"), nb::arg("state_dtype"), nb::arg("max_sequences"),
            nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"), nb::arg("nodes"), nb::arg("team"),
            nb::arg("beside").none(), nb::arg("lookahead"),
            nb::sig(
                "def __init__(self, layers: collections.abc.Sequence[RecurrentShape], weights: "
                "collections.abc.Sequence[tuple[_Matrix | None, _Floats | None, _Floats | None, _Floats | None]], "
                "dtype: str, state_dtype: str, max_sequences: int, threads: int, cpus: "
                "collections.abc.Sequence[int], isa: str, "
                "nodes: collections.abc.Sequence[int], team: bool, beside: KvCache | None, lookahead: int) -> None"),
            R"(Reserve the address space of the states; memory is touched when a slot opens.

Args:
    layers: Shapes of the model's recurrent layers.
    weights: Of each layer (conv_weight [channels, taps], conv_bias [channels], rate [heads * decay_dim],
        skip [heads]), float32, or None in place of one that the layer has not; copied.
    dtype: float32 or bfloat16, of rows and outputs.
    state_dtype: float32, or bfloat16: states are rounded to it after every token.
    max_sequences: Slots are 0 to max_sequences - 1.
    threads: Number of threads, the calling one included.
    cpus: One CPU per thread to pin workers to, or an empty list.
    isa: Instruction set to use, or an empty string for the best.
    nodes: NUMA node of each of cpus, or an empty list.
    team: True to run on the process's OpenMP threads.
    beside: KV cache whose threads and nodes are used in place of threads, cpus, nodes and team, or None.
    lookahead: Tokens by which slots may be truncated after a call of one token more at most.

Raises:
    RuntimeError: If the system maps no more memory.)")
        .def("extend", &extend, nb::arg("slots"), nb::arg("counts"),
             nb::sig("def extend(self, " HPCDECODE_SLOTS ") -> None"),
             "Let slots[i] have counts[i] more tokens; open slots that are new, with states of zero.")
        .def("run", &run, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("rows"), nb::arg("out"),
             nb::sig("def run(self, layer: int, " HPCDECODE_SLOTS ", rows: _Matrix, out: _Matrix) -> None"),
             R"(Take the last counts[i] tokens of slots[i] through a layer's states.

Every layer runs once after each extend, with the same counts. A token's result does not depend on the other
sequences of the call, on how many tokens come at once, nor on the number of threads.

Args:
    layer: Index of the recurrent layer.
    slots: int32 [n], each slot once.
    counts: int32 [n].
    rows: Rows of the tokens in order, [sum(counts), row_columns].
    out: Result, [sum(counts), out_columns], of the same dtype; overwritten.)")
        .def("release", &release, nb::arg("slots"), nb::sig("def release(self, slots: _Ints) -> None"),
             "Close slots and give their memory back to the system.")
        .def("fork", &StateStore::fork, nb::arg("src"), nb::arg("dst"), nb::call_guard<nb::gil_scoped_release>(),
             "Open slot dst with a copy of all that slot src has.")
        .def("truncate", &StateStore::truncate, nb::arg("slot"), nb::arg("length"),
             R"(Drop the last tokens of a slot, which came with a call of 1 + `lookahead` at most, but not its first.

Raises:
    ValueError: If one of them is in the slot's states.)")
        .def("length", &StateStore::length, nb::arg("slot"), "Return the number of tokens that an open slot has had.")
        .def("check", &StateStore::check, R"(Check that every place is free or held by one slot.

Raises:
    RuntimeError: With the equation that does not hold.)")
        .def("rewrite_seconds", &StateStore::rewrite_seconds, nb::call_guard<nb::gil_scoped_release>(),
             "Return the seconds in which the threads read and write the open slots' memory: the floor of run.")
        .def_prop_ro("state_bytes", &StateStore::state_bytes, "Bytes of a sequence in all layers, as reserved.")
        .def_prop_ro("open_slots", &StateStore::open_slots, "Number of open slots.")
        .def_prop_ro("bytes_moved", &StateStore::bytes_moved, "Bytes of states that run has read and written so far.")
        .def_prop_ro("run_seconds", &StateStore::run_seconds, "Seconds spent in run so far.")
        .def_prop_ro("threads", &StateStore::threads, "Number of threads.")
        .def_prop_ro("nodes", &StateStore::nodes, "Number of NUMA nodes that its threads are on.")
        .def_prop_ro(
            "isa", [](const StateStore& s) { return std::string(s.isa()); }, "Name of the instruction set in use.");
}

}  // namespace

void bind_states(nb::module_& m) {
    bind_recurrent_shape(m);
    bind_store(m);
    m.def(
        "state_bytes",
        [](const std::vector<RecurrentShape>& layers, const std::string& dtype, const std::string& state_dtype,
           const std::string& isa, int lookahead) {
            const StateTypes types{parse_act_type(dtype), parse_act_type(state_dtype)};
            return place_bytes(layers, types, select_isa(isa).recur.width, lookahead);
        },
        nb::arg("layers"), nb::arg("dtype"), nb::arg("state_dtype"), nb::arg("isa"), nb::arg("lookahead"),
        "Return the bytes that a StateStore reserves for a sequence.");
}

}  // namespace hpcdecode
