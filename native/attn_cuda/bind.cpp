// The Python module hpcdecode._attn_cuda, and hpcdecode._attn_cuda_emulated, whose device is this machine's memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_ranges.h"
#include "bind_recurrence.h"
#include "kv_cache.h"
#include "tensor.h"
#include "weights_api.h"

namespace nb = nanobind;
using namespace hpcdecode;

namespace {

Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

void extend(KvCache& e, nb::handle slots, nb::handle counts, uintptr_t stream) {
    const Sequences s = read_sequences(slots, counts);
    nb::gil_scoped_release unlocked;
    e.extend(s.slots.data, s.counts.data, s.slots.size, stream_of(stream));
}

void append(KvCache& e, int layer, nb::handle slots, nb::handle counts, nb::handle kv, uintptr_t stream) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix m = read_matrix(kv, "kv", false, kDeviceType);
    nb::gil_scoped_release unlocked;
    e.append(layer, s.slots.data, s.counts.data, s.slots.size, m, stream_of(stream));
}

void attend(KvCache& e, int layer, nb::handle slots, nb::handle counts, nb::handle qkv, nb::handle out,
            nb::handle sinks, uintptr_t stream) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix in = read_matrix(qkv, "qkv", false, kDeviceType), result = read_matrix(out, "out", true, kDeviceType);
    std::vector<float> extra;
    if (!sinks.is_none()) extra = read_floats(sinks, "sinks");
    nb::gil_scoped_release unlocked;
    e.attend(layer, s.slots.data, s.counts.data, s.slots.size, in, result, sinks.is_none() ? nullptr : &extra,
             stream_of(stream));
}

// Returns the blocks of every layer, or those of all groups, as tensors of torch, which keep the KV cache.
nb::list memory(nb::handle self) {
    const KvCache& e = nb::cast<const KvCache&>(self);
    nb::list found;
    for (const KvCache::Strip& strip : e.strips()) {
        const size_t shape[] = {static_cast<size_t>(e.arena_blocks()), static_cast<size_t>(strip.block_bytes)};
        found.append(nb::ndarray<nb::pytorch, uint8_t>(strip.base, 2, shape, self, nullptr, nb::dtype<uint8_t>(),
                                                       kDeviceType, e.device()));
    }
    return found;
}

void expand_weights(int form, uintptr_t packed, uintptr_t out, const std::string& dtype, int experts, int outputs,
                    int64_t inputs, int device, uintptr_t stream) {
    if (dtype != "float32" && dtype != "bfloat16") throw nb::value_error("dtype: expected float32 or bfloat16");
    const auto own = static_cast<ops::WeightForm>(form);
    ExpandArgs args = expand_args(own, dtype == "float32" ? ActType::kF32 : ActType::kBF16, outputs, inputs);
    args.packed = reinterpret_cast<const uint8_t*>(packed);
    args.out = reinterpret_cast<void*>(out);
    nb::gil_scoped_release unlocked;
    const Using used(device);
    launch_expand(args, own, experts, stream_of(stream));
}

void release(KvCache& e, nb::handle slots) {
    const Ints s = read_ints(slots, "slots");
    nb::gil_scoped_release unlocked;
    e.release(s.data, s.size);
}

}  // namespace

NB_MODULE(HPCDECODE_MODULE, m) {
    m.doc() = "Attention on a device: the KV cache of an R-rank with a GPU, or of the emulation of one.";
    bind_common(m);
    bind_recurrence(m);

    nb::class_<KvCache> kv_cache(m, "KvCache",
                                 R"(A paged KV cache in a device's memory, with the kernels that attend to it.

A slot is a small int that the caller chooses for a sequence.
Calls put their work on a CUDA stream and return before it is done; tensors must stay until then.
Bad arguments raise ValueError or TypeError before anything changes.)");
    kv_cache
        .def(
            "__init__",
            [](KvCache* e, const std::vector<LayerShape>& layers, const std::string& kv_dtype, int64_t capacity_tokens,
               int max_sequences, int block_tokens, int device, int batches, int range_blocks, int frames,
               bool windowed, int lookahead) {
                new (e) KvCache(layers, {parse_kv_type(kv_dtype),
                                         capacity_tokens,
                                         max_sequences,
                                         block_tokens,
                                         device,
                                         batches,
                                         {range_blocks, frames},
                                         windowed,
                                         lookahead});
            },
            nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("capacity_tokens"), nb::arg("max_sequences"),
            nb::arg("block_tokens"), nb::arg("device"), nb::arg("batches") = 18, nb::arg("range_blocks") = 0,
            nb::arg("frames") = 0, nb::arg("windowed") = false, nb::arg("lookahead") = 0,
            R"(Allocate a KV cache on a device.

Args:
    layers: Shapes of the model's attention layers.
    kv_dtype: float32, float16, bfloat16, int8, k8v4 or int4.
    capacity_tokens: Tokens to hold, rounded up to whole blocks.
    max_sequences: Slots are 0 to max_sequences - 1.
    block_tokens: Tokens of a block.
    device: Number of the device.
    batches: Calls whose sequences stay on the device; with 2 a lane and 2 more none waits for another.
    range_blocks: Blocks of a page, or 0 if every block has a place of its own.
    frames: Number of pages of any layer that memory has room for.
    windowed: Whether sequences give up the blocks that left a layer's window (see layer_groups).
    lookahead: Tokens by which they may be truncated all the same.

Raises:
    MemoryError: If the device has no room.)")
        .def("extend", &extend, nb::arg("slots"), nb::arg("counts"), nb::arg("stream"),
             nb::sig("def extend(self, " HPCDECODE_SLOTS ", stream: int) -> None"),
             R"(Make room for counts[i] more tokens in slots[i]; open slots that are new.

Raises:
    CapacityError: If there are too few free blocks; nothing changes.)")
        .def("append", &append, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("kv"), nb::arg("stream"),
             nb::sig("def append(self, layer: int, " HPCDECODE_SLOTS ", kv: _Matrix, stream: int) -> None"),
             R"(Write K and V of the last counts[i] positions of slots[i].

Args:
    layer: Index of the attention layer.
    slots: int32 [n] on the host, each slot once.
    counts: int32 [n] on the host.
    kv: Rows [k | v], [sum(counts), kv_heads * (k_dim + v_dim)], or [k] of a latent layer, on the device.
    stream: Address of the CUDA stream, or 0 for the default one.)")
        .def("attend", &attend, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("qkv"), nb::arg("out"),
             nb::arg("sinks").none(), nb::arg("stream"),
             nb::sig("def attend(self, layer: int, " HPCDECODE_SLOTS ", qkv: _Matrix, out: _Matrix, " HPCDECODE_SINKS
                     ", stream: int) -> None"),
             R"(Append, then attend causally from the last counts[i] positions over all of slots[i].

Args:
    layer: Index of the attention layer.
    slots: int32 [n] on the host, each slot once.
    counts: int32 [n] on the host.
    qkv: Rows [q | k | v], or [q | k] of a latent layer, [sum(counts), q_columns + kv_columns], on the device.
    out: Result, [sum(counts), q_heads * v_dim], of the dtype of qkv, on the device; overwritten.
    sinks: float32 [q_heads] on the host, or None for a layer without sinks.
    stream: Address of the CUDA stream, or 0 for the default one.)")
        .def("release", &release, nb::arg("slots"), nb::sig("def release(self, slots: _Ints) -> None"),
             "Free the blocks of sequences and close their slots.")
        .def("fork", &KvCache::fork, nb::arg("src"), nb::arg("dst"),
             "Open slot dst with the blocks of slot src; a shared block is copied before it is written.")
        .def("truncate", &KvCache::truncate, nb::arg("slot"), nb::arg("length"),
             "Drop the positions of a slot from length on.")
        .def("length", &KvCache::length, nb::arg("slot"), "Return the number of positions that an open slot holds.")
        .def("blocks", &KvCache::blocks, nb::arg("slot"),
             "Return the ids of an open slot's blocks, in order, group by group.")
        .def(
            "memory", &memory, nb::sig("def memory(self) -> list[object]"),
            "Return blocks of each layer, or of all groups, torch.uint8 [blocks, bytes]; layers share those of frames.")
        .def("check", &KvCache::check, R"(Check that every block is free or referenced, and counted right.

Raises:
    RuntimeError: With the equation that does not hold.)")
        .def_prop_ro(
            "used_tokens", [](const KvCache& e) { return e.table().used_tokens(); }, "Tokens of the blocks in use.")
        .def_prop_ro(
            "capacity_tokens", [](const KvCache& e) { return e.table().capacity_tokens(); }, "Tokens of all blocks.")
        .def_prop_ro(
            "free_blocks", [](const KvCache& e) { return e.table().free_blocks() / e.table().groups(); },
            "Number of free blocks over all layers.")
        .def_prop_ro(
            "block_tokens", [](const KvCache& e) { return e.table().block_tokens(); }, "Tokens of a block.")
        .def_prop_ro("bytes", &KvCache::bytes, "Bytes of the arena on the device.")
        .def_prop_ro("bytes_read", &KvCache::bytes_read, "Bytes of K and V that attend has read so far.");
    bind_ranges(kv_cache);

    m.def(
        "serves",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, int device) {
            return serves(layers, parse_kv_type(kv_dtype), device);
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("device"),
        "Return whether there are kernels for these layers, and room for them in a device's shared memory.");
    m.def("expand_weights", &expand_weights, nb::arg("form"), nb::arg("packed"), nb::arg("out"), nb::arg("dtype"),
          nb::arg("experts"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("device"), nb::arg("stream"),
          R"(Expand weights in few bits to matrices.

Args:
    form: Value of a WeightForm of _ops_cpu.
    packed: Address on the device of what _ops_cpu packs, one expert after the other.
    out: Address on the device of the result, [experts, outputs, inputs], a multiple of 16.
    dtype: float32 or bfloat16, of the result.
    experts: Number of weights.
    outputs: Outputs of each.
    inputs: Inputs, a multiple of what the form's must be.
    device: Number of the device.
    stream: Address of the CUDA stream, or 0 for the default one.

Raises:
    ValueError: If the form is none in few bits, or the dtype another.)");
    m.def("device_count", &device_count,
          "Return the number of devices that the driver shows, 0 without a driver. Throw RuntimeError if it fails.");
    m.def(
        "block_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, int block_tokens) {
            return bytes_per_block(lay_out(layers, parse_kv_type(kv_dtype), block_tokens));
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens"),
        "Return the bytes of a block over all layers.");
    m.def(
        "layer_groups",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, int block_tokens) {
            const LayerGroups groups = group_layers(layers, lay_out(layers, parse_kv_type(kv_dtype), block_tokens));
            return std::make_pair(groups.block_bytes, windows_of(groups));
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens"),
        "Return (bytes of a block, (window or 0, chunked) of each group of layers) of windowed KV caches.");
}
