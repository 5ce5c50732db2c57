#include "bind_recurrent.h"

#include <nanobind/stl/string.h>

#include <stdexcept>

#include "recurrent_shape.h"

namespace nb = nanobind;

namespace hpcdecode {

ActType parse_act_type(const std::string& dtype) {
    if (dtype == "float32") return ActType::kF32;
    if (dtype == "bfloat16") return ActType::kBF16;
    throw std::invalid_argument("dtype: expected float32 or bfloat16, got '" + dtype + "'");
}

void bind_recurrent_shape(nb::module_& m) {
    nb::class_<RecurrentShape>(m, "RecurrentShape", "The shape of one recurrent layer.")
        .def(
            "__init__",
            [](RecurrentShape* s, int heads, int k_heads, int k_dim, int v_dim, int taps, bool silu, bool delta,
               bool normalised, float scale, int decay_dim, bool has_beta, bool has_rate, int compress_rate,
               bool overlaps) {
                const RecurrentShape shape{heads,      k_heads, k_dim,     v_dim,    taps,     silu,          delta,
                                           normalised, scale,   decay_dim, has_beta, has_rate, compress_rate, overlaps};
                check_recurrent(shape);
                new (s) RecurrentShape(shape);
            },
            nb::arg("heads"), nb::arg("k_heads"), nb::arg("k_dim"), nb::arg("v_dim"), nb::arg("taps"), nb::arg("silu"),
            nb::arg("delta"), nb::arg("normalised"), nb::arg("scale"), nb::arg("decay_dim"), nb::arg("has_beta"),
            nb::arg("has_rate"), nb::arg("compress_rate") = 0, nb::arg("overlaps") = false,
            R"(Describe a recurrent layer.

The channels of q, k and v go through the convolution. Then a token changes the state S [k_dim, v_dim] of each
head: S = exp(decay) * S; e = v - S^T k if delta, else v; e = beta * e; S = S + k e^T; o = S^T q + skip * v.
Arithmetic is in float32, and o is rounded once.

Args:
    heads: Number of heads of v, decay, beta and the state.
    k_heads: Number of heads of q and k; head h uses k head h // (heads // k_heads).
    k_dim: Elements of a head of q and k; 0 for a layer without a state, whose output is v.
    v_dim: Elements of a head of v.
    taps: Taps of a causal convolution of each channel of q, k and v; 0 for none.
    silu: True if its result goes through SiLU.
    delta: True for the delta rule.
    normalised: True if q and k of each head become x / sqrt(sum(x^2) + 1e-6) after the convolution.
    scale: Factor of q, after that.
    decay_dim: Log decays of a head: 1, or k_dim for one of each row of the state.
    has_beta: True if each head has a factor of what is written.
    has_rate: True if the log decay is beta * rate, and not in the rows.
    compress_rate: Tokens of a window of a compressor, whose rows are [values | gates in float32] and whose
        heads are channels; 0 for none.
    overlaps: True if each of its means is over the window before, too, for which rows then have values and
        gates in front of the others.

Raises:
    ValueError: If the numbers make no sense together.)")
        .def(
            "row_columns",
            [](const RecurrentShape& s, const std::string& dtype) { return s.row_columns(parse_act_type(dtype)); },
            nb::arg("dtype"),
            R"(Return the columns of a row [q | k | v | decay | beta] in float32 or bfloat16.

q, k and v are of this dtype. Decays [heads * decay_dim], left out with has_rate or k_dim 0, and betas [heads],
if has_beta, are float32; each takes two columns of bfloat16.)")
        .def_prop_ro("out_columns", &RecurrentShape::out_columns, "Columns of the output: heads * v_dim.");
}

}  // namespace hpcdecode
