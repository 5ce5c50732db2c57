#include "bind_prompts.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <tuple>

#include "bind_recurrent.h"
#include "prefill.h"
#include "region_play.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

constexpr size_t kBesideFields = 10;
constexpr const char* kKinds[] = {"attend", "append", "pack", "prompt"};

std::vector<PromptChunk> read_chunks(nb::sequence packed, const Ints& begin, const Ints& n, nb::handle skipped) {
    const Ints first = skipped.is_none() ? Ints{} : read_ints(skipped, "skipped_queries");
    if (!skipped.is_none() && first.size != n.size) {
        throw std::invalid_argument("skipped_queries: expected " + std::to_string(n.size) + ", got " +
                                    std::to_string(first.size));
    }
    if (begin.size != n.size || static_cast<size_t>(n.size) != nb::len(packed)) {
        throw std::invalid_argument("packed, starts and counts: expected the same length, got " +
                                    std::to_string(nb::len(packed)) + ", " + std::to_string(begin.size) + " and " +
                                    std::to_string(n.size));
    }
    std::vector<PromptChunk> chunks;
    for (int i = 0; i < n.size; ++i) {
        const Bytes b = read_bytes(packed[i], "packed");
        chunks.push_back({b.data, b.size, begin.data[i], n.data[i], skipped.is_none() ? 0 : first.data[i]});
    }
    return chunks;
}

std::vector<float> read_sinks(nb::handle sinks) {
    return sinks.is_none() ? std::vector<float>() : read_floats(sinks, "sinks");
}

const float* pointer(nb::handle sinks, const std::vector<float>& values) {
    return sinks.is_none() ? nullptr : values.data();
}

// The rows of a KV cache as Python gives them, and what keeps them alive.
struct Beside {
    explicit Beside(const nb::tuple& t) {
        if (nb::len(t) != kBesideFields) {
            throw std::invalid_argument("beside: expected " + std::to_string(kBesideFields) + " fields, got " +
                                        std::to_string(nb::len(t)));
        }
        cache = nb::cast<KvCache*>(t[0]);
        prompts = read_sequences(t[2], t[3]);
        decodes = read_sequences(t[5], t[6]);
        sinks = read_sinks(t[9]);
        rows = {nb::cast<int>(t[1]),
                prompts.slots.data,
                prompts.counts.data,
                prompts.slots.size,
                read_matrix(t[4], "kv", false),
                decodes.slots.data,
                decodes.counts.data,
                decodes.slots.size,
                read_matrix(t[7], "qkv", false),
                read_matrix(t[8], "out", true),
                pointer(t[9], sinks),
                static_cast<int64_t>(sinks.size())};
    }
    KvCache* cache;
    Sequences prompts, decodes;
    std::vector<float> sinks;
    LayerRows rows;
};

std::tuple<double, double, double> attend(Prefill& p, int layer, nb::sequence packed, nb::handle starts,
                                          nb::handle counts, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                                          nb::handle sinks, nb::handle skipped_queries, nb::handle beside) {
    const Ints begin = read_ints(starts, "starts"), n = read_ints(counts, "counts");
    const std::vector<float> extra = read_sinks(sinks);
    const PromptRows rows{read_chunks(packed, begin, n, skipped_queries),
                          read_matrix(q, "q", false),
                          read_matrix(k, "k", false),
                          read_matrix(v, "v", false),
                          read_matrix(out, "out", true),
                          pointer(sinks, extra),
                          static_cast<int64_t>(extra.size())};
    std::optional<Beside> more;
    if (!beside.is_none()) more.emplace(nb::cast<nb::tuple>(beside));
    RegionSeconds s;
    {
        nb::gil_scoped_release unlocked;
        s = p.attend(layer, rows, more ? more->cache : nullptr, more ? &more->rows : nullptr);
    }
    return {s.attend, s.append, s.prefill};
}

std::vector<std::tuple<std::string, int64_t, int64_t, double, double>> items(const Prefill& p) {
    std::vector<std::tuple<std::string, int64_t, int64_t, double, double>> out;
    for (const ItemTime& t : p.item_times()) out.emplace_back(kKinds[t.kind], t.group, t.token, t.estimate, t.seconds);
    return out;
}

std::vector<std::tuple<std::string, int, double, double>> play(const LayerShape& shape, const std::string& kv_dtype,
                                                               int block_tokens, const std::vector<int64_t>& lengths,
                                                               const std::vector<std::pair<int64_t, int64_t>>& chunks,
                                                               int threads, double seconds_per_byte,
                                                               double seconds_per_product, double seconds_per_token,
                                                               bool together) {
    std::vector<std::tuple<std::string, int, double, double>> out;
    for (const PlayedItem& i : play_region({shape, parse_kv_type(kv_dtype), block_tokens, threads, lengths, chunks,
                                            seconds_per_byte, seconds_per_product, seconds_per_token, together}))
        out.emplace_back(kKinds[i.kind], i.thread, i.begin, i.end);
    return out;
}

}  // namespace

void bind_prompts(nb::module_& m) {
    nb::class_<Prefill>(m, "Prefill",
                        R"(Causal attention of prompts over their own K and V, which the caller holds packed.

Calls exclude each other and release the GIL.
Bad arguments raise ValueError or TypeError before anything is written.)")
        .def(
            "__init__",
            [](Prefill* p, const std::vector<LayerShape>& layers, const std::string& dtype, int threads,
               const std::vector<int>& cpus, const std::string& isa, const KvCache* beside) {
                auto workers = beside ? beside->workers() : make_workers(true, threads, cpus);
                new (p) Prefill(layers, parse_act_type(dtype), std::move(workers), isa);
            },
            nb::arg("layers"), nb::arg("dtype"), nb::arg("threads"), nb::arg("cpus"), nb::arg("isa"),
            nb::arg("beside").none(), R"(Prepare the attention of prompts.

Args:
    layers: Shapes of the model's attention layers.
    dtype: float32 or bfloat16, of all activations.
    threads: Number of threads, the calling one included.
    cpus: One CPU per thread to pin workers to, or an empty list.
    isa: Instruction set to use, or an empty string for the best.
    beside: KV cache whose threads are used, or None for the OpenMP threads.)")
        .def("packed_bytes", &Prefill::packed_bytes, nb::arg("layer"), nb::arg("tokens"),
             "Return the bytes that hold the packed K and V of a prompt's tokens at a layer.")
        .def("attend", &attend, nb::arg("layer"), nb::arg("packed"), nb::arg("starts"), nb::arg("counts"), nb::arg("q"),
             nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("sinks").none() = nb::none(),
             nb::arg("skipped_queries").none() = nb::none(), nb::arg("beside").none() = nb::none(),
             nb::sig("def attend(self, layer: int, packed: collections.abc.Sequence[_Bytes], starts: _Ints, "
                     "counts: _Ints, "
                     "q: _Matrix, k: _Matrix, v: _Matrix, out: _Matrix, " HPCDECODE_SINKS
                     " = None, skipped_queries: _Ints | None = None, beside: tuple[KvCache, int, _Ints, _Ints, "
                     "_Matrix, _Ints, _Ints, _Matrix, _Matrix, _Floats | None] | None = None) "
                     "-> tuple[float, float, float]"),
             R"(Pack k and v of the chunks, then attend causally from the chunks' tokens.

The threads do the work of a KV cache beside it: each takes the longest item left of either.

Args:
    layer: Index of the attention layer.
    packed: For every chunk uint8 memory of its prompt, with the tokens before starts[i].
    starts: int32 [n], position of the chunk's first token in its prompt.
    counts: int32 [n], tokens of the chunk.
    q: Queries of the chunks' tokens in order, [sum(counts), q_heads * k_dim].
    k: Keys, [sum(counts), kv_heads * k_dim].
    v: Values, [sum(counts), kv_heads * v_dim].
    out: Result, [sum(counts), q_heads * v_dim].
    sinks: float32 [q_heads], or None for a layer without sinks.
    skipped_queries: int32 [n], how many of a chunk's first tokens need no result, or None.
    beside: None, or what a KV cache is to do: (KV cache, layer, slots, counts and kv as its append takes them,
        slots, counts, qkv, out and sinks as its attend takes them). A slot is in one of the two lists.
        The KV cache is the one whose threads are used.

Returns:
    The seconds of the call, dealt out by what threads spent: attend and append of the KV cache, and prompts.)")
        .def_prop_rw("traces", &Prefill::traces, &Prefill::set_traces, nb::arg("value"),
                     "True to let the calling thread run all items of attend, and note what each took.")
        .def_prop_ro("items", &items, nb::sig("def items(self) -> list[tuple[str, int, int, float, float]]"),
                     R"(The items of the last call, as they were taken, if it was traced.

Each is (kind, group, token, estimated seconds, seconds); kind is attend, append, pack or prompt.
All but attend have the group of their sequence and head.)")
        .def_prop_ro("thread_seconds", &Prefill::thread_seconds,
                     "Seconds of attend so far, times the number of threads.")
        .def_prop_ro("busy_seconds", &Prefill::busy_seconds, "Seconds of these in which threads had work.")
        .def_prop_ro(
            "isa", [](const Prefill& p) { return std::string(p.isa()); }, "Name of the instruction set in use.")
        .def_prop_ro("threads", &Prefill::threads, "Number of threads.");
    m.def("play_region", &play, nb::arg("shape"), nb::arg("kv_dtype"), nb::arg("block_tokens"), nb::arg("lengths"),
          nb::arg("chunks"), nb::arg("threads"), nb::arg("seconds_per_byte"), nb::arg("seconds_per_product"),
          nb::arg("seconds_per_token"), nb::arg("together"),
          R"(Return what attention of a layer would take, without K and V.

Its items are cut, and threads take them, as Prefill.attend has it.

Args:
    shape: Of the layer.
    kv_dtype: Of the KV cache.
    block_tokens: Tokens of a block.
    lengths: Of sequences that decode, their new tokens included.
    chunks: First token and tokens of every chunk of a prompt.
    threads: Number of threads.
    seconds_per_byte: Of a thread that attends to a byte of the KV cache.
    seconds_per_product: Of a thread that multiplies for prompts.
    seconds_per_token: Of a thread that packs or appends a token of a KV head.
    together: True for one region; False if what is appended, what attends, and prompts follow each other.

Returns:
    Every item as (kind, thread, begin, end), as they are taken; kind is attend, append, pack or prompt.)");
}

}  // namespace hpcdecode
