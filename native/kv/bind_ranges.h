// Binds what KV caches with frames on every device share; see placed_pages.h. Part of the Python modules only.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "tensor.h"

namespace hpcdecode {

template <class Cache>
void bind_ranges(nanobind::class_<Cache>& kv_cache) {
    namespace nb = nanobind;
    kv_cache
        .def(
            "place_pages",
            [](Cache& e, nb::handle frames) {
                const Ints f = read_ints(frames, "frames");
                e.place_pages(f.data, f.size);
            },
            nb::arg("frames"), nb::sig("def place_pages(self, frames: _Ints) -> None"),
            "Say in which frame each page of a layer lies for the calls to come, or -1.")
        .def("take_copies", &Cache::take_copies,
             "Return the copies of blocks, (from, to) in every layer, that extend left to be made since the last call.")
        .def(
            "mark_ranges",
            [](Cache& e, nb::handle slots, nb::handle counts, bool all, nb::handle marks) {
                const Sequences s = read_sequences(slots, counts);
                const Bytes b = read_bytes(marks, "marks");
                e.mark_ranges(s.slots.data, s.counts.data, s.slots.size, all, b.data, b.size);
            },
            nb::arg("slots"), nb::arg("counts"), nb::arg("all"), nb::arg("marks"),
            nb::sig("def mark_ranges(self, " HPCDECODE_SLOTS ", all: bool, marks: _Bytes) -> None"),
            R"(Mark the ranges in which slots have blocks.

Args:
    slots: int32 [n], each slot once.
    counts: int32 [n].
    all: True for all blocks, False for those of the last counts[i] positions.
    marks: uint8 [n * ranges], 1 or 0.)")
        .def(
            "written_blocks",
            [](Cache& e, nb::handle slots, nb::handle counts) {
                const Sequences s = read_sequences(slots, counts);
                return e.written_blocks(s.slots.data, s.counts.data, s.slots.size);
            },
            nb::arg("slots"), nb::arg("counts"), nb::sig("def written_blocks(self, " HPCDECODE_SLOTS ") -> list[int]"),
            "Return the blocks of the last counts[i] positions of slots[i].")
        .def(
            "mark_used",
            [](Cache& e, nb::handle marks) {
                const Bytes b = read_bytes(marks, "marks");
                e.mark_used(b.data, b.size);
            },
            nb::arg("marks"), nb::sig("def mark_used(self, marks: _Bytes) -> None"),
            "Set marks, uint8 [blocks], to 1 for every block that a slot holds, to 0 for others.")
        .def_prop_ro("ranges", &Cache::ranges, "Number of ranges of blocks.")
        .def_prop_ro("frame_bytes", &Cache::frame_bytes, "Bytes of a page, and of a frame.");
}

}  // namespace hpcdecode
