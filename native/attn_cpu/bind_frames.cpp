#include "bind_frames.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bind_ranges.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

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
    bind_ranges(kv_cache);
    kv_cache
        .def("copy_block", &KvCache::copy_block, nb::arg("source"), nb::arg("target"),
             "Copy a block of the layer whose pages were placed last.")
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
            "address", [](const KvCache& e) { return reinterpret_cast<uintptr_t>(e.pool().data()); },
            "Address of the arena, where frames lie one behind the other.");
}

}  // namespace hpcdecode
