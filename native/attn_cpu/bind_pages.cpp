#include "bind_pages.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "page_table.h"
#include "tensor.h"

namespace nb = nanobind;

namespace hpcdecode {
namespace {

void set_live(PageTable& t, nb::handle live) {
    const Bytes b = read_bytes(live, "live");
    t.set_live(b.data, b.size);
}

template <auto kMethod>
PageTable::Moves change(PageTable& t, int layer, nb::handle parts) {
    const Bytes b = read_bytes(parts, "parts");
    return (t.*kMethod)(layer, b.data, b.size);
}

int find_able(const PageTable& t, int layer, nb::handle needs, nb::handle able) {
    const Bytes n = read_bytes(needs, "needs"), a = read_bytes(able, "able");
    return t.find_able(layer, n.data, n.size, a.data, a.size);
}

void place(PageTable& t, KvCache& kv_cache, int layer) {
    const std::vector<int32_t>& frames = t.frames(layer);
    kv_cache.place_pages(frames.data(), static_cast<int>(frames.size()));
}

void wrote(PageTable& t, int layer, nb::handle blocks) {
    const Ints b = read_ints(blocks, "blocks");
    t.wrote(layer, b.data, b.size);
}

void grew(PageTable& t, int layer, nb::handle blocks, nb::handle tokens) {
    const Ints b = read_ints(blocks, "blocks"), n = read_ints(tokens, "tokens");
    if (b.size != n.size)
        throw std::invalid_argument("tokens: expected one for each of " + std::to_string(b.size) + " blocks, got " +
                                    std::to_string(n.size));
    t.grew(layer, b.data, n.data, b.size);
}

void seal(const KvCache& e, PageMove& move, nb::handle journal) {
    const Bytes b = read_bytes(journal, "journal");
    nb::gil_scoped_release unlocked;
    e.seal(move, b.data, b.size);
}

bool unseal(KvCache& e, const PageMove& move, nb::handle journal) {
    const Bytes b = read_bytes(journal, "journal");
    nb::gil_scoped_release unlocked;
    return e.unseal(move, b.data, b.size);
}

// Returns the checksums of a page's blocks that move, of a page that lies in memory.
std::vector<uint32_t> sums_in(const PageMove& move, nb::handle page, int64_t block_bytes) {
    const Bytes b = read_bytes(page, "page");
    const int64_t end = move.blocks.empty() ? 0 : (move.blocks.back() + 1) * block_bytes;
    if (block_bytes < 1 || b.size < end)
        throw std::invalid_argument("page: expected " + std::to_string(end) + " bytes, got " + std::to_string(b.size));
    nb::gil_scoped_release unlocked;
    return move.sums_at(b.data, block_bytes);
}

void seal_page(PageMove& move, nb::handle page, int64_t block_bytes) { move.sums = sums_in(move, page, block_bytes); }

bool unseal_page(const PageMove& move, nb::handle page, int64_t block_bytes) {
    return sums_in(move, page, block_bytes) == move.sums;
}

void bind_move(nb::module_& m) {
    nb::class_<PageMove>(m, "PageMove", "What moves of a page of a KV cache with frames, in or out.")
        .def_ro("writes", &PageMove::writes, "True if it goes out.")
        .def_prop_ro(
            "page", [](const PageMove& p) { return std::make_pair(p.page.layer, p.page.range); },
            "Layer and range of the page.")
        .def_ro("frame", &PageMove::frame, "Number of the frame that it lies in.")
        .def_ro("blocks", &PageMove::blocks, "The page's blocks that move as a whole.")
        .def_ro("runs", &PageMove::runs, "Begin and end of these in the page, in bytes, as tiers can move them.")
        .def_prop_ro(
            "journal", [](const PageMove& p) { return std::make_pair(p.journal_begin(), p.journal_end()); },
            "Begin and end of what moves of the page's journal, in bytes.")
        .def_prop_ro(
            "items",
            [](const PageMove& p) {
                std::vector<std::vector<int32_t>> items;
                for (const TokenItem& i : p.items) items.push_back({i.block, i.first, i.count, i.at});
                return items;
            },
            "Tokens in the journal: block, first token, how many, byte of the journal.")
        .def_prop_ro("nbytes", &PageMove::bytes, "Bytes that move.")
        .def("seal", &seal_page, nb::arg("page"), nb::arg("block_bytes"),
             nb::sig("def seal(self, page: _Bytes, block_bytes: int) -> None"),
             "Take the checksums of its blocks, of a page without a journal that was copied to memory, uint8.")
        .def("unseal", &unseal_page, nb::arg("page"), nb::arg("block_bytes"),
             nb::sig("def unseal(self, page: _Bytes, block_bytes: int) -> bool"),
             "Return whether a page without a journal that was read into memory, uint8, has the checksums of its "
             "blocks.");
}

}  // namespace

void bind_pages(nb::module_& m, nb::class_<KvCache>& kv_cache) {
    bind_move(m);
    nb::class_<PageTable>(m, "PageTable",
                          R"(Which pages of a KV cache with frames lie in memory, and which of them move next.

It decides; others move what it returns, in order, and say so. Calls must exclude each other.
Marks are uint8, 1 or 0, one a range, unless said otherwise.)")
        .def(
            "__init__",
            [](PageTable* t, int ranges, int range_blocks, int block_tokens, int64_t block_bytes, int64_t journal_bytes,
               int64_t alignment, const std::vector<int64_t>& row_bytes, int frames, int window) {
                const int layers = static_cast<int>(row_bytes.size());
                new (t) PageTable(
                    {layers, ranges, range_blocks, block_tokens, block_bytes, journal_bytes, alignment, row_bytes},
                    frames, window);
            },
            nb::arg("ranges"), nb::arg("range_blocks"), nb::arg("block_tokens"), nb::arg("block_bytes"),
            nb::arg("journal_bytes"), nb::arg("alignment"), nb::arg("row_bytes"), nb::arg("frames"), nb::arg("window"),
            R"(Begin with all pages absent.

Args:
    ranges: Number of ranges of blocks.
    range_blocks: Blocks of a page, in one range at one layer.
    block_tokens: Tokens of a block.
    block_bytes: Bytes of a block at a layer.
    journal_bytes: Room for single tokens behind the blocks of a page in a tier.
    alignment: Of what tiers read and write, in bytes.
    row_bytes: Bytes of a token at every layer.
    frames: Pages that memory has room for.
    window: Pages that come in ahead of their use.)")
        .def("set_live", &set_live, nb::arg("live"), nb::sig("def set_live(self, live: _Bytes) -> None"),
             "Say which blocks sequences hold, uint8 [ranges * range_blocks]; what others held is forgotten.")
        .def("pin", &change<&PageTable::pin>, nb::arg("layer"), nb::arg("parts"),
             nb::sig("def pin(self, layer: int, parts: _Bytes) -> list[PageMove]"),
             "Have pages of a layer come in, and stay until unpin; return the moves that begin.")
        .def("unpin", &change<&PageTable::unpin>, nb::arg("layer"), nb::arg("parts"),
             nb::sig("def unpin(self, layer: int, parts: _Bytes) -> list[PageMove]"),
             "Let pages of a layer go, which are needed again when all others have been; return the moves that begin.")
        .def("pump", &PageTable::pump, "Return the moves that begin now.")
        .def("find_able", &find_able, nb::arg("layer"), nb::arg("needs"), nb::arg("able"),
             nb::sig("def find_able(self, layer: int, needs: _Bytes, able: _Bytes) -> int"),
             R"(Find the rows that have all their pages; return their number.

Args:
    layer: Of the pages.
    needs: uint8 [n * ranges], the ranges that each row needs.
    able: uint8 [n], set to 1 or 0.)")
        .def("place", &place, nb::arg("kv_cache"), nb::arg("layer"),
             "Tell a KV cache in which frame each page of a layer lies for the calls to come.")
        .def("frames", &PageTable::frames, nb::arg("layer"), "Return the frame of each page of a layer, or -1.")
        .def("wrote", &wrote, nb::arg("layer"), nb::arg("blocks"),
             nb::sig("def wrote(self, layer: int, blocks: _Ints) -> None"),
             "Note that blocks of pinned pages changed, whatever of them.")
        .def("grew", &grew, nb::arg("layer"), nb::arg("blocks"), nb::arg("tokens"),
             nb::sig("def grew(self, layer: int, blocks: _Ints, tokens: _Ints) -> None"),
             "Note that blocks of pinned pages grew by one token each, tokens of the blocks.")
        .def("was_moved", &PageTable::was_moved, nb::arg("move"),
             "Note that a move has come to its end; some of its blocks may be others' by now.")
        .def("broken", &PageTable::broken,
             "Return what does not hold of: frames are free or have one page, blocks are somewhere; empty if all does.")
        .def_prop_ro("any_pinned", &PageTable::any_pinned, "True if any page has to stay.");
    kv_cache
        .def("seal", &seal, nb::arg("move"), nb::arg("journal"),
             nb::sig("def seal(self, move: PageMove, journal: _Bytes) -> None"),
             R"(Take the checksums of what a move writes, and copy its tokens to the journal of its page.

Other calls may run that leave this frame alone.)")
        .def("unseal", &unseal, nb::arg("move"), nb::arg("journal"),
             nb::sig("def unseal(self, move: PageMove, journal: _Bytes) -> bool"),
             R"(Copy the tokens of a page's journal to the frame; False if something is not what was written.

Other calls may run that leave this frame alone.)");
}

}  // namespace hpcdecode
