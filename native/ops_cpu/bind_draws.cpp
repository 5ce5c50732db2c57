#include "bind_draws.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "draw.h"
#include "masks.h"

namespace nb = nanobind;

namespace hpcdecode::ops {

namespace {

Rows rows_at(int64_t address, int64_t row_bytes) {
    return {reinterpret_cast<char*>(static_cast<intptr_t>(address)), row_bytes};
}

std::vector<int64_t> draw_rows(int64_t logits, int64_t row_bytes, Type type, int64_t vocabulary,
                               const std::vector<int64_t>& rows, const std::vector<Draw>& draws, int threads,
                               const std::string& isa) {
    if (rows.size() != draws.size()) throw std::invalid_argument("draw: expected a draw for every row");
    nb::gil_scoped_release unlocked;
    return draw(rows_at(logits, row_bytes), type, vocabulary, rows, draws, threads, isa);
}

}  // namespace

void bind_draws(nb::module_& m) {
    nb::class_<Draw>(m, "Draw", "How the token of one row of logits is drawn.")
        .def(
            "__init__",
            [](Draw* d, float temperature, float min_p, int64_t top_k, float top_p, double uniform) {
                new (d) Draw{temperature, min_p, top_k, top_p, uniform};
            },
            nb::arg("temperature"), nb::arg("min_p"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("uniform"),
            R"(Keep the sampling parameters of a row.

Args:
    temperature: Divisor of the logits, above 0.
    min_p: Least probability relative to the largest, or 0 for all tokens.
    top_k: Number of most likely tokens, or 0 for all.
    top_p: Share of the most likely tokens, or 1 for all.
    uniform: Random number in (0, 1).)");
    m.def("draw", &draw_rows, nb::arg("logits"), nb::arg("row_bytes"), nb::arg("type"), nb::arg("vocabulary"),
          nb::arg("rows"), nb::arg("draws"), nb::arg("threads"), nb::arg("isa"),
          R"(Draw one token from some rows of logits.

Args:
    logits: Address of the logits, [., vocabulary].
    row_bytes: Bytes from row to row.
    type: float32 or bfloat16.
    vocabulary: Number of tokens.
    rows: Index of the row of every draw.
    draws: Sampling parameters, one for each of rows.
    threads: Number of OpenMP threads.
    isa: Instruction set to use.

Returns:
    The token ids, one for each of draws.)");
    m.def(
        "keep_allowed",
        [](int64_t logits, int64_t row_bytes, int64_t vocabulary, const std::vector<int64_t>& rows, int64_t masks,
           int64_t words, int threads) {
            nb::gil_scoped_release unlocked;
            const auto* bits = reinterpret_cast<const uint32_t*>(static_cast<intptr_t>(masks));
            keep_allowed(rows_at(logits, row_bytes), vocabulary, rows, bits, words, threads);
        },
        nb::arg("logits"), nb::arg("row_bytes"), nb::arg("vocabulary"), nb::arg("rows"), nb::arg("masks"),
        nb::arg("words"), nb::arg("threads"),
        R"(Set the logits of tokens that masks do not allow to -inf; where all others are -inf already, these become 0.

Args:
    logits: Address of the logits, float32 [., vocabulary].
    row_bytes: Bytes from row to row.
    vocabulary: Number of tokens.
    rows: Index of the row of every mask.
    masks: Address of the masks, uint32 [len(rows), words]; bit i % 32 of word i / 32 allows token i.
    words: Words of a mask.
    threads: Number of OpenMP threads.)");
}

}  // namespace hpcdecode::ops
