#include "bind_frames.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

void place_pages(KvCache& e, nb::handle frames) {
    const Ints f = read_ints(frames, "frames");
    e.place_pages(f.data, f.size);
}

void mark_ranges(KvCache& e, nb::handle slots, nb::handle counts, bool all, nb::handle marks) {
    const Sequences s = read_sequences(slots, counts);
    const Bytes b = read_bytes(marks, "marks");
    e.mark_ranges(s.slots.data, s.counts.data, s.slots.size, all, b.data, b.size);
}

std::vector<int32_t> written_blocks(KvCache& e, nb::handle slots, nb::handle counts) {
    const Sequences s = read_sequences(slots, counts);
    return e.written_blocks(s.slots.data, s.counts.data, s.slots.size);
}

void mark_used(KvCache& e, nb::handle marks) {
    const Bytes b = read_bytes(marks, "marks");
    e.mark_used(b.data, b.size);
}

template <auto kMove>
void move_tokens(KvCache& e, int layer, int frame, nb::handle items, nb::handle rows) {
    const Ints i = read_ints(items, "items");
    const Bytes b = read_bytes(rows, "rows");
    if (i.size % 4 != 0)
        throw std::invalid_argument("items: expected four numbers each, got " + std::to_string(i.size));
    nb::gil_scoped_release unlocked;
    (e.*kMove)(layer, frame, i.data, i.size / 4, b.data, b.size);
}

}  // namespace

void bind_frames(nb::class_<KvCache>& kv_cache) {
    kv_cache
        .def("place_pages", &place_pages, nb::arg("frames"), nb::sig("def place_pages(self, frames: _Ints) -> None"),
             "Say in which frame each page of a layer lies for the calls to come, or -1.")
        .def("copy_block", &KvCache::copy_block, nb::arg("source"), nb::arg("target"),
             "Copy a block of the layer whose pages were placed last.")
        .def("take_copies", &KvCache::take_copies,
             "Return the copies of blocks, (from, to) in every layer, that extend left to be made since the last call.")
        .def("mark_ranges", &mark_ranges, nb::arg("slots"), nb::arg("counts"), nb::arg("all"), nb::arg("marks"),
             nb::sig("def mark_ranges(self, " HPCDECODE_SLOTS ", all: bool, marks: _Bytes) -> None"),
             R"(Mark the ranges in which slots have blocks.

Args:
    slots: int32 [n], each slot once.
    counts: int32 [n].
    all: True for all blocks, False for those of the last counts[i] positions.
    marks: uint8 [n * ranges], 1 or 0.)")
        .def("written_blocks", &written_blocks, nb::arg("slots"), nb::arg("counts"),
             nb::sig("def written_blocks(self, " HPCDECODE_SLOTS ") -> list[int]"),
             "Return the blocks of the last counts[i] positions of slots[i].")
        .def("mark_used", &mark_used, nb::arg("marks"), nb::sig("def mark_used(self, marks: _Bytes) -> None"),
             "Set marks, uint8 [blocks], to 1 for every block that a slot holds, to 0 for others.")
        .def("row_bytes", &KvCache::row_bytes, nb::arg("layer"), "Return the bytes of a token at a layer.")
        .def("save_tokens", &move_tokens<&KvCache::save_tokens>, nb::arg("layer"), nb::arg("frame"), nb::arg("items"),
             nb::arg("rows"),
             nb::sig("def save_tokens(self, layer: int, frame: int, items: _Ints, rows: _Bytes) -> None"),
             R"(Copy tokens of blocks that lie in a frame to rows; other calls may run that leave this frame alone.

Args:
    layer: Of the page in the frame.
    frame: Its number.
    items: int32 [n * 4]: a block of the page, its first token, how many, and the byte of rows where they begin.
    rows: uint8, row_bytes a token.)")
        .def("restore_tokens", &move_tokens<&KvCache::restore_tokens>, nb::arg("layer"), nb::arg("frame"),
             nb::arg("items"), nb::arg("rows"),
             nb::sig("def restore_tokens(self, layer: int, frame: int, items: _Ints, rows: _Bytes) -> None"),
             "Copy tokens back, as save_tokens has them, in order.")
        .def_prop_ro(
            "ranges", [](const KvCache& e) { return e.pool().nodes(); }, "Number of ranges of blocks.")
        .def_prop_ro(
            "frame_bytes", [](const KvCache& e) { return e.pool().frame_bytes(); }, "Bytes of a page, and of a frame.")
        .def_prop_ro(
            "address", [](const KvCache& e) { return reinterpret_cast<uintptr_t>(e.pool().data()); },
            "Address of the arena, where frames lie one behind the other.");
}

}  // namespace hpcdecode
