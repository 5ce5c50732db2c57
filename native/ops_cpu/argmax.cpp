#include "argmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "kernel_api.h"
#include "row_memory.h"
#include "team.h"

namespace hpcdecode::ops {

// A panel that may have the largest output of a row.
struct Argmax::Candidate {
    int64_t panel, row;
    float most;  // upper bound of its outputs
};

struct Argmax::Call {
    int64_t rows;
    const ScreenedRows& x;
    const ScreenedWeights& weight;
};

// The results of a thread, by row: a lower bound of the largest output, the largest computed output and its index.
struct Argmax::Member {
    std::vector<Candidate> candidates;
    std::vector<float> floors, values;
    std::vector<int64_t> ids;
};

Argmax::Argmax(Type in, Type out, int64_t words, int64_t outputs, const std::string& isa)
    : out_(out),
      words_(words),
      exact_(in, out, words, outputs, isa),
      rounded_(Type::i8, Type::f32, words / kBytes[static_cast<int>(in)], outputs, isa),
      table_(&kernels_for(isa)) {
    if (!offered(in, out, isa)) throw std::invalid_argument("argmax: " + isa + " has none of these types");
    if (words % kBytes[static_cast<int>(in)] != 0) throw std::invalid_argument("argmax: expected whole int8 words");
}

bool Argmax::offered(Type in, Type out, const std::string& isa) {
    const Products& products = kernels_for(isa).products;
    const bool as_it_is = products.values[static_cast<int>(in)] == nullptr;  // `compare` makes tiles of x
    return in != Type::i8 && as_it_is && products.screen != nullptr && Product::offered(in, out, isa);
}

double Argmax::run(int64_t rows, const ScreenedRows& x, const ScreenedWeights& weight, int64_t* ids, float* values,
                   int threads) const {
    const Call call{rows, x, weight};
    std::vector<Member> members(threads);
    const auto screen_own = [&](int part, int parts) { screen(call, members[part], part, parts); };
    run_team(threads, threads, screen_own);
    const std::vector<Candidate> left = candidates(members, rows);
    for (Member& member : members) {
        member.values.assign(rows, -HUGE_VALF);
        member.ids.assign(rows, 0);
    }
    const auto compare_own = [&](int part, int parts) {
        const auto count = static_cast<int64_t>(left.size());
        compare(call, members[part], left.data() + share(count, part, parts),
                left.data() + share(count, part + 1, parts));
    };
    run_team(threads, threads, compare_own);
    for (int64_t r = 0; r < rows; ++r) {
        const auto best = std::max_element(members.begin(), members.end(),
                                           [r](const Member& a, const Member& b) { return a.values[r] < b.values[r]; });
        ids[r] = best->ids[r];
        values[r] = best->values[r];
    }
    return static_cast<double>(left.size()) / static_cast<double>(rows * exact_.panels());
}

void Argmax::screen(const Call& call, Member& me, int member, int members) const {
    me.floors.assign(call.rows, -HUGE_VALF);
    alignas(kLine) float results[kMostTileRows * kPanel];
    float most[kScreenRows];
    const auto visit = [&](Tile& tile, int64_t row, int count, int64_t panel) {
        tile.out = reinterpret_cast<char*>(results);
        tile.out_bytes = kPanel * sizeof(float);
        rounded_.compute(tile, count);
        const ScreenedRows& x = call.x;
        const float* norms = call.weight.norms + panel * 2 * kPanel;
        for (int i = 0; i < count; i += kScreenRows) {
            const int64_t first = row + i;
            uint32_t found = table_->products.screen({std::min(count - i, kScreenRows), tile.columns,
                                                      results + i * kPanel, norms, x.scales + first, x.lost + first,
                                                      x.kept + first, me.floors.data() + first, most});
            for (int r = 0; found != 0; ++r, found >>= 1)
                if ((found & 1) != 0) me.candidates.push_back({panel, first + r, most[r]});
        }
    };
    rounded_.each_tile(call.rows, call.x.rounded, call.weight.rounded, rounded_.own(member, members), nullptr, nullptr,
                       visit);
}

// Returns the candidates of all members that are left after all panels, by panel.
std::vector<Argmax::Candidate> Argmax::candidates(std::vector<Member>& members, int64_t rows) const {
    std::vector<float> floors(rows, -HUGE_VALF);
    for (const Member& member : members)
        for (size_t r = 0; r < member.floors.size(); ++r) floors[r] = std::max(floors[r], member.floors[r]);
    std::vector<Candidate> left;
    for (const Member& member : members)
        std::copy_if(member.candidates.begin(), member.candidates.end(), std::back_inserter(left),
                     [&](const Candidate& c) { return c.most >= floors[c.row]; });
    std::stable_sort(left.begin(), left.end(),
                     [](const Candidate& a, const Candidate& b) { return a.panel < b.panel; });
    return left;
}

// Goes through panels in order, so that the first of equal outputs is found.
void Argmax::compare(const Call& call, Member& me, const Candidate* begin, const Candidate* end) const {
    const int64_t x_bytes = words_ * static_cast<int64_t>(sizeof(uint32_t));
    const int64_t apart = row_distance(x_bytes);
    const int64_t out_bytes = kPanel * kBytes[static_cast<int>(out_)];
    const int most = exact_.tile_rows();
    std::vector<char> rows(most * apart);
    alignas(kLine) char results[kMostTileRows * kPanel * sizeof(float)];
    float values[kPanel];
    while (begin < end) {
        int count = 0;
        for (; count < most && begin + count < end && begin[count].panel == begin->panel; ++count)
            std::memcpy(rows.data() + count * apart, call.x.exact.data + begin[count].row * call.x.exact.row_bytes,
                        x_bytes);
        const int columns = exact_.columns(begin->panel);
        const uint32_t* panel = exact_.panel(call.weight.exact, begin->panel);
        Tile tile{rows.data(), apart, panel, words_, results, out_bytes, columns, {}};
        if (begin + count < end) {
            const auto* next = reinterpret_cast<const char*>(exact_.panel(call.weight.exact, begin[count].panel));
            tile.next = {next, next + words_ * kLine};
        }
        exact_.compute(tile, count);
        for (int r = 0; r < count; ++r) {
            table_->load[static_cast<int>(out_)](columns, results + r * out_bytes, values);
            const float top = table_->largest(columns, values);
            const int64_t row = begin[r].row;
            if (top <= me.values[row]) continue;
            me.values[row] = top;
            me.ids[row] = begin->panel * kPanel + (std::find(values, values + columns, top) - values);
        }
        begin += count;
    }
}

}  // namespace hpcdecode::ops
