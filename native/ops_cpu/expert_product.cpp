#include "expert_product.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "row_memory.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int64_t kMostRows = 8 * kTileRows;  // of a unit, so that they stay in a core's cache
constexpr int64_t kUnitsPerThread = 8;        // at least, where there are panels enough, so that threads end together

}  // namespace

// Rows of one weight, some of those in `order` from `first` on, by some panels of its weight.
struct ExpertProduct::Unit {
    int64_t weight, first, count;
    Panels panels;
};

// Rows by weight, each weight's in their order. Those without a weight are left out.
class ExpertProduct::Sorted {
  public:
    Sorted(const ExpertRows& rows, const ExpertProduct& by)
        : starts(by.experts_ * std::max<int64_t>(by.adapters_, 1) + 1) {
        const int64_t count = rows.tokens * by.choices_, weights = static_cast<int64_t>(starts.size()) - 1;
        std::vector<int64_t> weight(count);
        for (int64_t r = 0; r < count; ++r) {
            weight[r] = by.weight_of(rows, r);
            if (weight[r] >= 0) ++starts[weight[r] + 1];
        }
        for (int64_t w = 0; w < weights; ++w) starts[w + 1] += starts[w];
        std::vector<int64_t> ends(starts.begin(), starts.end() - 1);
        order.resize(starts[weights]);
        for (int64_t r = 0; r < count; ++r) {
            if (weight[r] >= 0) {
                order[ends[weight[r]]++] = r;
            } else {
                others.push_back(r);
            }
        }
    }

    std::vector<Unit> units(int64_t panels, int threads) const {
        std::vector<Unit> blocks, made;
        for (size_t w = 0; w + 1 < starts.size(); ++w) {
            const int64_t rows = starts[w + 1] - starts[w], parts = (rows + kMostRows - 1) / kMostRows;
            for (int64_t i = 0; i < parts; ++i) {
                const int64_t begin = share(rows, i, parts), end = share(rows, i + 1, parts);
                blocks.push_back({static_cast<int64_t>(w), starts[w] + begin, end - begin, {0, panels}});
            }
        }
        if (blocks.empty()) return made;
        const auto count = static_cast<int64_t>(blocks.size());
        const int64_t parts = std::clamp<int64_t>((kUnitsPerThread * threads + count - 1) / count, 1, panels);
        for (const Unit& block : blocks)
            for (int64_t i = 0; i < parts; ++i) {
                made.push_back(block);
                made.back().panels = {share(panels, i, parts), share(panels, i + 1, parts)};
            }
        return made;
    }

    std::vector<int64_t> starts, order, others;
};

struct ExpertProduct::Call {
    const ExpertProduct& product;
    const ExpertRows& rows;
    const char* weight;
    const Sorted& sorted;

    Rows weight_of(const Unit& unit) const {
        return {const_cast<char*>(weight) + unit.weight * product.product_.weight_bytes(), 0};
    }
    char* out(int64_t r) const {
        const int64_t choices = product.choices_;
        return rows.out.data + r / choices * rows.out.row_bytes + r % choices * product.product_.out_bytes();
    }
    Rows gathered(const Unit& unit) const;
};

ExpertProduct::ExpertProduct(const Product& product, int64_t experts, int64_t first, int64_t choices, bool shared,
                             int64_t adapters)
    : product_(product), experts_(experts), first_(first), choices_(choices), shared_(shared), adapters_(adapters) {
    if (experts < 1 || first < 0 || adapters < 0) throw std::invalid_argument("expert product: expected experts");
    if (choices < 1) throw std::invalid_argument("expert product: expected a choice for every token");
    if (product.heads() != 1) throw std::invalid_argument("expert product: expected one head");
    if (product.updates() && adapters > 0)
        throw std::invalid_argument("expert product: expected weights of experts to update, got those of adapters");
}

// Returns the number of the weight of row r, or -1 if there is none.
int64_t ExpertProduct::weight_of(const ExpertRows& rows, int64_t r) const {
    const auto of_token = [&](const Rows& from) {
        return reinterpret_cast<const int64_t*>(from.data + r / choices_ * from.row_bytes);
    };
    const int64_t expert = of_token(rows.experts)[r % choices_] - first_;
    if (expert < 0 || expert >= experts_) return -1;
    if (adapters_ == 0) return expert;
    const int64_t adapter = *of_token(rows.adapters);
    return adapter < 0 || adapter >= adapters_ ? -1 : adapter * experts_ + expert;
}

// Takes unit after unit. The next one is known while one is computed, so that its weights can be fetched meanwhile.
int64_t ExpertProduct::run(const ExpertRows& rows, const char* weight, int member, int members,
                           std::atomic<int64_t>& next, int64_t begin) const {
    const Sorted sorted(rows, *this);
    const Call call{*this, rows, weight, sorted};
    const auto others = static_cast<int64_t>(sorted.others.size());
    for (int64_t i = share(others, member, members); i < share(others, member + 1, members); ++i)
        std::memset(call.out(sorted.others[i]), 0, product_.out_bytes());
    const std::vector<Unit> units = sorted.units(product_.panels(), members);
    const auto count = static_cast<int64_t>(units.size());
    int64_t held = -1;  // the first of the rows that are gathered
    Rows gathered{};
    for (int64_t mine = next++ - begin, then; mine < count; mine = then) {
        const Unit& unit = units[mine];
        then = next++ - begin;
        if (held != unit.first) gathered = call.gathered(unit);
        held = unit.first;
        const uint32_t* next_panel =
            then < count ? product_.panel(call.weight_of(units[then]), units[then].panels.first) : nullptr;
        const auto* after = reinterpret_cast<const char*>(next_panel);
        if (!product_.updates() || !multiply_updated(call, unit, gathered, after))
            multiply(call, unit, gathered, after);
    }
    return begin + count + members;  // every member took one that there is not
}

// Returns a unit's rows of x side by side.
Rows ExpertProduct::Call::gathered(const Unit& unit) const {
    const int64_t bytes = product.product_.x_bytes(), choices = product.choices_;
    static thread_local std::vector<char> memory;
    const Rows made = rows_in(memory, unit.count, bytes);
    for (int64_t i = 0; i < unit.count; ++i) {
        const int64_t r = sorted.order[unit.first + i], inside = product.shared_ ? 0 : r % choices * bytes;
        std::memcpy(made.data + i * made.row_bytes, rows.x.data + r / choices * rows.x.row_bytes + inside, bytes);
    }
    return made;
}

void ExpertProduct::multiply(const Call& call, const Unit& unit, const Rows& gathered, const char* next) const {
    constexpr int64_t kApart = kPanel * sizeof(float);
    alignas(kLine) char results[kMostTileRows * kApart];
    const int64_t* rows = call.sorted.order.data() + unit.first;
    const auto visit = [&](Tile& tile, int64_t row, int count, int64_t panel) {
        tile.out = results;
        tile.out_bytes = kApart;
        const int64_t apart = tile.out_apart = count * kApart;
        product_.multiply(tile, count);
        for (int64_t p = 0; p < tile.panels; ++p)
            for (int i = 0; i < count; ++i)
                std::memcpy(call.out(rows[row + i]) + product_.first_byte(panel + p), results + p * apart + i * kApart,
                            product_.bytes(panel + p));
    };
    product_.each_tile<true>(unit.count, gathered, call.weight_of(unit), unit.panels, next, nullptr, visit);
}

// Computes a unit whose outputs are updated; returns false, and computes nothing, if no row of it has an adapter.
bool ExpertProduct::multiply_updated(const Call& call, const Unit& unit, const Rows& gathered, const char* next) const {
    static thread_local std::vector<int64_t> numbers;
    static thread_local std::vector<char> low_memory, out_memory;
    const int64_t* rows = call.sorted.order.data() + unit.first;
    const auto adapter = [&](int64_t i) {
        return *reinterpret_cast<const int64_t*>(call.rows.adapters.data +
                                                 rows[i] / choices_ * call.rows.adapters.row_bytes);
    };
    numbers.resize(unit.count);
    bool any = false;
    for (int64_t i = 0; i < unit.count; ++i) {
        numbers[i] = adapter(i) < 0 ? -1 : adapter(i) * experts_ + unit.weight;
        any = any || numbers[i] >= 0;
    }
    if (!any) return false;
    const int64_t low_bytes = product_.update().x_bytes();
    const Rows low = rows_in(low_memory, unit.count, low_bytes);
    for (int64_t i = 0; i < unit.count; ++i)
        std::memcpy(low.data + i * low.row_bytes,
                    call.rows.low.data + rows[i] / choices_ * call.rows.low.row_bytes + rows[i] % choices_ * low_bytes,
                    low_bytes);
    const Rows made = rows_in(out_memory, unit.count, product_.out_bytes());
    const Rows of_rows{reinterpret_cast<char*>(numbers.data()), sizeof(int64_t)};
    product_.run_updated(unit.count, gathered, call.weight_of(unit), made, {of_rows, low, call.rows.b}, unit.panels,
                         next, nullptr);
    const int64_t last = unit.panels.last - 1, begin = product_.first_byte(unit.panels.first);
    const int64_t bytes = product_.first_byte(last) + product_.bytes(last) - begin;
    for (int64_t i = 0; i < unit.count; ++i)
        std::memcpy(call.out(rows[i]) + begin, made.data + i * made.row_bytes + begin, bytes);
    return true;
}

}  // namespace hpcdecode::ops
