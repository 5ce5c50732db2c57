#include "bind_recurrence.h"

#include <nanobind/stl/string.h>

#include "bind_recurrent.h"
#include "recurrence.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

const float* floats_at(uintptr_t address) { return reinterpret_cast<const float*>(address); }

void advance(const Recurrence& r, uintptr_t sequences, int count, int longest, nb::handle rows, nb::handle out,
             uintptr_t inputs, uintptr_t stream) {
    const Matrix in = read_matrix(rows, "rows", false, kDeviceType),
                 result = read_matrix(out, "out", true, kDeviceType);
    nb::gil_scoped_release unlocked;
    r.advance(reinterpret_cast<const int32_t*>(sequences), count, longest, in, result, reinterpret_cast<float*>(inputs),
              reinterpret_cast<Stream>(stream));
}

}  // namespace

void bind_recurrence(nb::module_& m) {
    bind_recurrent_shape(m);
    nb::class_<Recurrence>(m, "Recurrence", R"(A recurrent layer whose states are on a device.

It keeps nothing itself: memory is given by addresses on the device, 0 for none, and must stay while it lives.)")
        .def(
            "__init__",
            [](Recurrence* r, const RecurrentShape& shape, const std::string& state_dtype, uintptr_t convolution,
               uintptr_t bias, uintptr_t rate, uintptr_t skip, uintptr_t windows, uintptr_t states, int device) {
                const RecurrenceMemory memory{floats_at(convolution),
                                              floats_at(bias),
                                              floats_at(rate),
                                              floats_at(skip),
                                              reinterpret_cast<float*>(windows),
                                              reinterpret_cast<void*>(states)};
                new (r) Recurrence(shape, parse_act_type(state_dtype), memory, device);
            },
            nb::arg("shape"), nb::arg("state_dtype"), nb::arg("convolution"), nb::arg("bias"), nb::arg("rate"),
            nb::arg("skip"), nb::arg("windows"), nb::arg("states"), nb::arg("device"), R"(Describe a layer.

Args:
    shape: Shape of the layer, which serves_states.
    state_dtype: float32, or bfloat16: states are rounded to it after every token.
    convolution: float32 [taps, channels].
    bias: float32 [channels].
    rate: float32 [heads, decay_dim]; where v_dim is 1 [decay_dim, heads].
    skip: float32 [heads].
    windows: float32 [places, taps - 1, channels].
    states: [places, heads, k_dim, v_dim]; where v_dim is 1 [places, k_dim, heads].
    device: Number of the device.

Raises:
    ValueError: If the shape has no kernels, or memory is missing.)")
        .def("advance", &advance, nb::arg("sequences"), nb::arg("count"), nb::arg("longest"), nb::arg("rows"),
             nb::arg("out"), nb::arg("inputs"), nb::arg("stream"),
             nb::sig("def advance(self, sequences: int, count: int, longest: int, rows: _Matrix, out: _Matrix, inputs: "
                     "int, stream: int) -> None"),
             R"(Take tokens through the layer. A token's result does not depend on what else is in the call.

Args:
    sequences: Address on the device of int32 [3, count]: places, numbers of tokens, first rows.
    count: Number of sequences.
    longest: Most tokens of one.
    rows: Rows [q | k | v | decay | beta] of the tokens on the device, those of a sequence in order.
    out: Result on the device, [rows, out_columns], of the same dtype; overwritten.
    inputs: Address on the device for float32 [rows, channels], of layers with a convolution and states.
    stream: Address of the CUDA stream, or 0 for the default one.

Raises:
    ValueError: If matrices have other sizes.)");
    m.def("serves_states", &serves_states, nb::arg("shape"), "Return whether there are kernels for a recurrent layer.");
}

}  // namespace hpcdecode
