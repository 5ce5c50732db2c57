// The Python module hpcdecode._attn_cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bandwidth.h"
#include "bind_blocks.h"
#include "bind_frames.h"
#include "bind_pages.h"
#include "bind_prompts.h"
#include "bind_states.h"
#include "bind_steps.h"
#include "isa.h"
#include "kv_cache.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace hpcdecode;

namespace {

void extend(KvCache& e, nb::handle slots, nb::handle counts) {
    const Sequences s = read_sequences(slots, counts);
    nb::gil_scoped_release unlocked;
    e.extend(s.slots.data, s.counts.data, s.slots.size);
}

void append(KvCache& e, int layer, nb::handle slots, nb::handle counts, nb::handle kv) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix m = read_matrix(kv, "kv", false);
    nb::gil_scoped_release unlocked;
    e.append(layer, s.slots.data, s.counts.data, s.slots.size, m);
}

void attend(KvCache& e, int layer, nb::handle slots, nb::handle counts, nb::handle qkv, nb::handle out,
            nb::handle sinks) {
    const Sequences s = read_sequences(slots, counts);
    const Matrix in = read_matrix(qkv, "qkv", false), result = read_matrix(out, "out", true);
    std::vector<float> extra;
    if (!sinks.is_none()) extra = read_floats(sinks, "sinks");
    const float* sink = sinks.is_none() ? nullptr : extra.data();
    nb::gil_scoped_release unlocked;
    e.attend(layer, s.slots.data, s.counts.data, s.slots.size, in, result, sink, static_cast<int64_t>(extra.size()));
}

void release(KvCache& e, nb::handle slots) {
    const Ints s = read_ints(slots, "slots");
    nb::gil_scoped_release unlocked;
    e.release(s.data, s.size);
}

}  // namespace

NB_MODULE(_attn_cpu, m) {
    m.doc() = "Attention on this machine's cores: the KV cache of an R-rank, and the prompt attention of an S-rank.";
    bind_common(m);

    nb::class_<KvCache> kv_cache(m, "KvCache",
                                 R"(A paged KV cache in this machine's memory, with its threads and kernels.

A slot is a small int that the caller chooses for a sequence. Calls exclude each other and release the GIL.
Bad arguments raise ValueError or TypeError before anything changes.)");
    kv_cache
        .def(
            "__init__",
            [](KvCache* e, const std::vector<LayerShape>& layers, const std::string& kv_dtype, int64_t capacity_tokens,
               int max_sequences, std::optional<int> block_tokens, int threads, const std::vector<int>& cpus,
               const std::string& isa, const std::vector<int>& nodes, bool team, int range_blocks, int frames,
               bool windowed, int lookahead) {
                new (e) KvCache(layers, {parse_kv_type(kv_dtype),
                                         capacity_tokens,
                                         max_sequences,
                                         block_tokens.value_or(default_block_tokens(layers)),
                                         threads,
                                         cpus,
                                         isa,
                                         nodes,
                                         team,
                                         {range_blocks, frames},
                                         windowed,
                                         lookahead});
            },
            nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("capacity_tokens"), nb::arg("max_sequences"),
            nb::arg("block_tokens").none(), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"), nb::arg("nodes"),
            nb::arg("team"), nb::arg("range_blocks") = 0, nb::arg("frames") = 0, nb::arg("windowed") = false,
            nb::arg("lookahead") = 0,
            R"(Reserve the address space of a KV cache; memory is touched when it is used.

Args:
    layers: Shapes of the model's attention layers.
    kv_dtype: float32, float16, bfloat16, int8, k8v4 or int4.
    capacity_tokens: Tokens to hold, rounded up to whole blocks.
    max_sequences: Slots are 0 to max_sequences - 1.
    block_tokens: Tokens of a block, or None for the default.
    threads: Number of threads, the calling one included.
    cpus: One CPU per thread to pin workers to, or an empty list.
    isa: Instruction set to use, or an empty string for the best.
    nodes: NUMA node of each of cpus, or an empty list.
    team: True to run on the process's OpenMP threads.
    range_blocks: Blocks of a page, or 0 if every block has a place of its own.
    frames: Number of pages of any layer that memory has room for.
    windowed: Whether sequences give up the blocks that left a layer's window (see layer_groups).
    lookahead: Tokens by which they may be truncated all the same.

Raises:
    RuntimeError: If the system maps no more memory.)")
        .def("extend", &extend, nb::arg("slots"), nb::arg("counts"),
             nb::sig("def extend(self, " HPCDECODE_SLOTS ") -> None"),
             R"(Make room for counts[i] more tokens in slots[i]; open slots that are new.

Raises:
    CapacityError: If there are too few free blocks; nothing changes.)")
        .def("append", &append, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("kv"),
             nb::sig("def append(self, layer: int, " HPCDECODE_SLOTS ", kv: _Matrix) -> None"),
             R"(Write K and V of the last counts[i] positions of slots[i].

Args:
    layer: Index of the attention layer.
    slots: int32 [n], each slot once.
    counts: int32 [n].
    kv: Rows [k | v], [sum(counts), kv_heads * (k_dim + v_dim)].)")
        .def("attend", &attend, nb::arg("layer"), nb::arg("slots"), nb::arg("counts"), nb::arg("qkv"), nb::arg("out"),
             nb::arg("sinks").none() = nb::none(),
             nb::sig("def attend(self, layer: int, " HPCDECODE_SLOTS ", qkv: _Matrix, out: _Matrix, " HPCDECODE_SINKS
                     " = None) -> None"),
             R"(Append, then attend causally from the last counts[i] positions over all of slots[i].

Args:
    layer: Index of the attention layer.
    slots: int32 [n], each slot once.
    counts: int32 [n].
    qkv: Rows [q | k | v], [sum(counts), q_heads * k_dim + kv_heads * (k_dim + v_dim)].
    out: Result, [sum(counts), q_heads * v_dim], of the dtype of qkv; overwritten.
    sinks: float32 [q_heads], or None for a layer without sinks.)")
        .def("release", &release, nb::arg("slots"), nb::sig("def release(self, slots: _Ints) -> None"),
             "Free the blocks of sequences and close their slots.")
        .def("fork", &KvCache::fork, nb::arg("src"), nb::arg("dst"),
             "Open slot dst with the blocks of slot src; a shared block is copied before it is written.")
        .def("truncate", &KvCache::truncate, nb::arg("slot"), nb::arg("length"),
             "Drop the positions of a slot from length on.")
        .def("length", &KvCache::length, nb::arg("slot"), "Return the number of positions that an open slot holds.")
        .def("check", &KvCache::check, R"(Check that every block is free or referenced, and counted right.

Raises:
    RuntimeError: With the equation that does not hold.)")
        .def("read_seconds", &KvCache::read_seconds, nb::call_guard<nb::gil_scoped_release>(),
             "Return the seconds in which the threads read the whole arena once: the floor of attending to all of it.")
        .def_prop_ro(
            "used_tokens", [](const KvCache& e) { return e.pool().used_tokens(); }, "Tokens of the blocks in use.")
        .def_prop_ro(
            "capacity_tokens", [](const KvCache& e) { return e.pool().capacity_tokens(); }, "Tokens of all blocks.")
        .def_prop_ro(
            "free_blocks", [](const KvCache& e) { return e.pool().free_blocks() / e.pool().groups(); },
            "Number of free blocks over all layers.")
        .def_prop_ro(
            "node_free_blocks",
            [](const KvCache& e) {
                std::vector<int64_t> free;
                for (int i = 0; i < e.pool().nodes(); ++i) free.push_back(e.pool().free_blocks(i));
                return free;
            },
            "Number of free blocks of each NUMA node, in the order of the nodes' numbers.")
        .def_prop_ro(
            "block_tokens", [](const KvCache& e) { return e.pool().block_tokens(); }, "Tokens of a block.")
        .def_prop_ro(
            "bytes", [](const KvCache& e) { return e.pool().bytes(); }, "Bytes of the arena, touched or not.")
        .def_prop_ro("threads", &KvCache::threads, "Number of threads.")
        .def_prop_ro(
            "isa", [](const KvCache& e) { return std::string(e.isa()); }, "Name of the instruction set in use.")
        .def_prop_ro("bytes_read", &KvCache::bytes_read, "Bytes of K and V that attend has read so far.")
        .def_prop_ro("attend_seconds", &KvCache::attend_seconds, "Seconds spent in attend so far.")
        .def_prop_ro("thread_seconds", &KvCache::thread_seconds,
                     "Seconds of append and attend so far, times the number of threads.")
        .def_prop_ro("busy_seconds", &KvCache::busy_seconds, "Seconds of these in which threads had work.");

    bind_blocks(m, kv_cache);
    bind_frames(kv_cache);
    bind_pages(m, kv_cache);
    bind_prompts(m);
    bind_states(m);
    bind_steps(m);

    m.def("built_isas", &built_isas, "Return the instruction sets of this build, worst first.");
    m.def("untested_isas", &untested_isas,
          "Return the instruction sets of this build that were tested under an emulator only.");
    m.def("supported_isas", &supported_isas,
          "Return the instruction sets of this build that CPU and system allow, worst first.");
    m.def(
        "select_isa", [](const std::string& forced) { return std::string(select_isa(forced).name); }, nb::arg("forced"),
        R"(Return the instruction set to use: forced, or the best for an empty string.

Raises:
    ValueError: If forced is unknown or unsupported here.)");
    m.def(
        "block_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, std::optional<int> block_tokens) {
            const int tokens = block_tokens.value_or(default_block_tokens(layers));
            return std::make_pair(bytes_per_block(lay_out(layers, parse_kv_type(kv_dtype), tokens)), tokens);
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens").none(),
        "Return (bytes of a block over all layers, tokens of a block).");
    m.def(
        "layer_groups",
        [](const std::vector<LayerShape>& layers, const std::string& kv_dtype, std::optional<int> block_tokens) {
            const int tokens = block_tokens.value_or(default_block_tokens(layers));
            const LayerGroups groups = group_layers(lay_out(layers, parse_kv_type(kv_dtype), tokens));
            return std::make_pair(groups.block_bytes, windows_of(groups));
        },
        nb::arg("layers"), nb::arg("kv_dtype"), nb::arg("block_tokens").none(),
        "Return (bytes of a block, (window or 0, chunked) of each group of layers) of windowed KV caches.");
    nb::class_<ReadProbe>(m, "ReadProbe", "A buffer of huge pages and the threads that read it.")
        .def(nb::init<size_t, int, const std::vector<int>&, const std::string&, const std::vector<int>&>(),
             nb::arg("bytes"), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"),
             nb::arg("nodes") = std::vector<int>(), R"(Allocate and touch the buffer.

Args:
    bytes: Size of the buffer.
    threads: Number of threads, the calling one included.
    cpus: One CPU per thread to pin workers to, or an empty list.
    isa: Instruction set to use, or an empty string for the best.
    nodes: NUMA node of each of cpus, or an empty list.)")
        .def("seconds", &ReadProbe::seconds, nb::call_guard<nb::gil_scoped_release>(),
             "Return the seconds in which the threads read the buffer once.")
        .def_prop_ro("bytes", &ReadProbe::bytes, "Bytes of the buffer.")
        .def_prop_ro(
            "address", [](const ReadProbe& p) { return reinterpret_cast<uintptr_t>(p.data()); },
            "Address of the buffer.");
}
