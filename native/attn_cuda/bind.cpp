// The Python module hpcdecode._attn_cuda, and hpcdecode._attn_cuda_emulated, whose device is this machine's memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "engine.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace hpcdecode;

namespace {

Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

void extend(Engine& e, nb::handle slots, nb::handle counts, uintptr_t stream) {
    const Sequences s = read_sequences(slots, counts);
    nb::gil_scoped_release unlocked;
    e.extend(s.slots.data, s.counts.data, s.slots.size, stream_of(stream));
}

void append(Engine& e, int layer, nb::handle slots, nb::handle counts, nb::handle kv, uintptr_t stream) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix m = read_matrix(kv, "kv", false, kDeviceType);
    nb::gil_scoped_release unlocked;
    e.append(layer, s.slots.data, s.counts.data, s.slots.size, m, stream_of(stream));
}

void attend(Engine& e, int layer, nb::handle slots, nb::handle counts, nb::handle qkv, nb::handle out, nb::handle sinks,
            uintptr_t stream) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix in = read_matrix(qkv, "qkv", false, kDeviceType), result = read_matrix(out, "out", true, kDeviceType);
    std::vector<float> extra;
    if (!sinks.is_none()) extra = read_floats(sinks, "sinks");
    nb::gil_scoped_release unlocked;
    e.attend(layer, s.slots.data, s.counts.data, s.slots.size, in, result, sinks.is_none() ? nullptr : &extra,
             stream_of(stream));
}

void release(Engine& e, nb::handle slots) {
    const Ints s = read_ints(slots, "slots");
    nb::gil_scoped_release unlocked;
    e.release(s.data, s.size);
}

}  // namespace

NB_MODULE(HPCDECODE_MODULE, m) {
    bind_common(m);

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* e, const std::vector<LayerShape>& layers, const std::string& kv_dtype, int64_t capacity_tokens,
               int max_sequences, int block_tokens, int device) {
                new (e) Engine(layers, {parse_kv_type(kv_dtype), capacity_tokens, max_sequences, block_tokens, device});
            },
            nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("capacity_tokens"), nb::arg("max_sequences"),
            nb::arg("block_tokens"), nb::arg("device"))
        .def("extend", &extend, nb::arg("slots"), nb::arg("counts"), nb::arg("stream"))
        .def("append", &append, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("kv"), nb::arg("stream"))
        .def("attend", &attend, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("qkv"), nb::arg("out"),
             nb::arg("sinks").none(), nb::arg("stream"))
        .def("release", &release, nb::arg("slots"))
        .def("fork", &Engine::fork, nb::arg("src"), nb::arg("dst"))
        .def("truncate", &Engine::truncate, nb::arg("slot"), nb::arg("length"))
        .def("length", &Engine::length, nb::arg("slot"))
        .def("check", &Engine::check)
        .def_prop_ro("used_tokens", [](const Engine& e) { return e.table().used_tokens(); })
        .def_prop_ro("capacity_tokens", [](const Engine& e) { return e.table().capacity_tokens(); })
        .def_prop_ro("free_blocks", [](const Engine& e) { return e.table().free_blocks(); })
        .def_prop_ro("block_tokens", [](const Engine& e) { return e.table().block_tokens(); })
        .def_prop_ro("bytes", &Engine::bytes)
        .def_prop_ro("bytes_read", &Engine::bytes_read);

    m.def("device_count", &device_count, "Devices that the driver shows; 0 without one.");
    m.def(
        "block_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, int block_tokens) {
            return bytes_per_block(lay_out(layers, parse_kv_type(kv_dtype), block_tokens));
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens"), "Bytes of one block over all layers.");
}
