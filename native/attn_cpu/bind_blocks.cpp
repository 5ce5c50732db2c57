#include "bind_blocks.h"

#include "crc32c.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

uint32_t copy_out(KvCache& e, int slot, int64_t first_block, nb::handle blocks) {
    const Bytes b = read_bytes(blocks, "blocks");
    nb::gil_scoped_release unlocked;
    return e.copy_out(slot, first_block, b.data, b.size);
}

void copy_in(KvCache& e, int slot, int64_t first_block, nb::handle blocks) {
    const Bytes b = read_bytes(blocks, "blocks");
    nb::gil_scoped_release unlocked;
    e.copy_in(slot, first_block, b.data, b.size);
}

template <uint32_t (*kSum)(const uint8_t*, size_t, uint32_t)>
uint32_t checksum(nb::handle data) {
    const Bytes b = read_bytes(data, "data");
    nb::gil_scoped_release unlocked;
    return kSum(b.data, b.size, 0);
}

}  // namespace

void bind_blocks(nb::module_& m, nb::class_<KvCache>& kv_cache) {
    kv_cache
        .def("copy_out", &copy_out, nb::arg("slot"), nb::arg("first_block"), nb::arg("blocks"),
             nb::sig("def copy_out(self, slot: int, first_block: int, blocks: _Bytes) -> int"),
             "Copy whole blocks of a slot, from first_block on, to blocks, layer by layer; return their CRC-32C.")
        .def("copy_in", &copy_in, nb::arg("slot"), nb::arg("first_block"), nb::arg("blocks"),
             nb::sig("def copy_in(self, slot: int, first_block: int, blocks: _Bytes) -> None"),
             "Copy what copy_out has given into the blocks of a slot.")
        .def_prop_ro(
            "block_bytes", [](const KvCache& e) { return e.pool().block_bytes(); },
            "Bytes of a block over all layers, or those of its group.")
        .def("held_blocks", &KvCache::held_blocks, nb::arg("slot"), "Return how many blocks a slot holds.");
    m.def("crc32c", &checksum<crc32c>, nb::arg("data"), nb::sig("def crc32c(data: _Bytes) -> int"),
          "Return the CRC-32C of data.");
    m.def("crc32c_by_table", &checksum<crc32c_by_table>, nb::arg("data"),
          nb::sig("def crc32c_by_table(data: _Bytes) -> int"), "Return the same without instructions for it.");
}

}  // namespace hpcdecode
