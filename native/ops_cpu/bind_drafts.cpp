#include "bind_drafts.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "drafter.h"

namespace nb = nanobind;

namespace hpcdecode::ops {

void bind_drafts(nb::module_& m) {
    nb::class_<Drafter>(m, "Drafter", "What the sequences of an S-rank share that get drafts of their next tokens.")
        .def(
            "__init__",
            [](Drafter* self, int shortest, int longest, int64_t outputs, double least) {
                new (self) Drafter({shortest, longest, outputs, least});
            },
            nb::arg("shortest"), nb::arg("longest"), nb::arg("outputs"), nb::arg("least"),
            R"(Keep the settings.

Args:
    shortest: Last tokens of a sequence that must have occurred before.
    longest: Last tokens that are compared at most.
    outputs: Most sequences of which others look up what they generated, the newest ones; 0: each looks up its
        own tokens alone.
    least: Chance of a guess that is ever made.

Raises:
    ValueError: If not 1 <= shortest <= longest.)");

    nb::class_<TokenHistory>(m, "TokenHistory", "The tokens of one sequence, and its drafts.")
        .def(nb::init<std::shared_ptr<Drafter>, const std::vector<int32_t>&>(), nb::arg("drafter"), nb::arg("given"),
             R"(Begin with the tokens of a prompt.

Args:
    drafter: Of the S-rank.
    given: Token ids, which others do not look up.)")
        .def("__len__", &TokenHistory::size)
        .def("extend", &TokenHistory::extend, nb::arg("tokens"),
             "Take tokens that were generated; what was guessed of them tells the chances of such guesses.")
        .def_prop_ro("expected", &TokenHistory::expected, "Tokens of the last draft that are right, on average.")
        .def("draft", &TokenHistory::draft, nb::arg("most"), nb::arg("least"),
             nb::arg("forced") = std::vector<int32_t>(),
             R"(Return tokens that may follow, or none.

Args:
    most: Number of tokens, at most.
    least: The chance that all of them follow is above it.
    forced: The first of them, by a grammar, if they are as likely; or none.)");
}

}  // namespace hpcdecode::ops
