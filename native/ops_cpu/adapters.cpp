#include "adapters.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hpcdecode::ops {
namespace {

constexpr int64_t kAddedBytes = 1 << 19;  // of updates that are computed together: a quarter of a core's cache

void require_one(const Product& product, int64_t adapters) {
    if (adapters < 1 || product.heads() != 1 || product.gated() || product.updates())
        throw std::invalid_argument("adapters: expected one or more, and a GEMM of one head, no gate and no update");
}

}  // namespace

AdapterProduct::AdapterProduct(const Product& product, int64_t adapters) : product_(product), adapters_(adapters) {
    require_one(product, adapters);
}

void AdapterProduct::run(int64_t rows, const Rows& adapters, const Rows& x, const Rows& weight, const Rows& out,
                         int member, int members) const {
    const AdapterRows sorted(adapters, 0, rows, adapters_);
    const int64_t panels = product_.panels(), units = static_cast<int64_t>(sorted.runs.size()) * panels;
    static thread_local std::vector<char> memory;
    alignas(kLine) char results[kMostTileRows * kPanel * sizeof(float)];
    constexpr int64_t kApart = kPanel * sizeof(float);
    for (int64_t unit = share(units, member, members), end = share(units, member + 1, members), last; unit < end;
         unit = last) {
        const AdapterRun& run = sorted.runs[unit / panels];
        last = std::min(end, (unit / panels + 1) * panels);
        const Rows gathered = sorted.gathered(run, x, product_.x_bytes(), memory);
        const Rows from{weight.data + run.adapter * product_.weight_bytes(), 0};
        const int64_t* to = sorted.order.data() + run.first;
        const auto visit = [&](Tile& tile, int64_t row, int count, int64_t panel) {
            tile.out = results;
            tile.out_bytes = kApart;
            product_.multiply(tile, count);
            for (int i = 0; i < count; ++i)
                std::memcpy(out.data + to[row + i] * out.row_bytes + product_.first_byte(panel), results + i * kApart,
                            product_.bytes(panel));
        };
        const Panels own{unit % panels, (last - 1) % panels + 1};
        product_.each_tile(run.count, gathered, from, own, nullptr, nullptr, visit);
    }
}

PanelUpdate::PanelUpdate(const Product& product, int64_t adapters, const Update& update, const RowRange& rows,
                         const Panels& own)
    : product_(product),
      update_(update),
      rows_(update.adapters, rows.first, rows.last, adapters),
      first_(rows.first),
      last_panel_(own.last),
      apart_(kPanel * product.out_size()) {
    if (rows_.empty()) return;
    places_.assign(rows.last - rows.first, -1);
    for (size_t i = 0; i < rows_.order.size(); ++i) places_[rows_.order[i] - first_] = static_cast<int64_t>(i);
    memory_.resize(rows_.runs.size());
    for (size_t i = 0; i < rows_.runs.size(); ++i)
        low_.push_back(rows_.gathered(rows_.runs[i], update.low, product_.x_bytes(), memory_[i]));
}

void PanelUpdate::compute(int64_t panel) {
    const int64_t bytes = static_cast<int64_t>(rows_.order.size()) * apart_;  // of a panel
    computed_ = {panel, std::min(panel + std::max<int64_t>(kAddedBytes / bytes, 1), last_panel_)};
    added_.resize((computed_.last - panel) * bytes);
    for (size_t i = 0; i < rows_.runs.size(); ++i) {
        const AdapterRun& run = rows_.runs[i];
        const Rows weight{update_.weight.data + run.adapter * product_.weight_bytes(), 0};
        const auto visit = [&](Tile& tile, int64_t row, int count, int64_t number) {
            tile.out = added_.data() + (number - panel) * bytes + (run.first + row) * apart_;
            tile.out_bytes = apart_;
            product_.multiply(tile, count);
        };
        product_.each_tile(run.count, low_[i], weight, computed_, nullptr, nullptr, visit);
    }
}

void PanelUpdate::add(int64_t panel, int64_t row, int64_t count, int columns, const Rows& outputs) {
    if (panel >= computed_.last) compute(panel);
    const char* const added = added_.data() + (panel - computed_.first) * rows_.order.size() * apart_;
    for (int64_t i = 0; i < count; ++i)
        if (const int64_t place = places_[row + i - first_]; place >= 0)
            product_.add(columns, added + place * apart_, outputs.data + i * outputs.row_bytes);
}

AdapterSum::AdapterSum(const Product& product, int64_t adapters) : product_(product), adapters_(adapters) {
    require_one(product, adapters);
}

void AdapterSum::run(int64_t rows, const Update& update, const Rows& y, const Rows& out, int member,
                     int members) const {
    const Panels own = product_.own(member, members);
    PanelUpdate added(product_, adapters_, update, {0, rows}, own);
    for (int64_t panel = own.first; panel < own.last; ++panel) {
        const int64_t begin = product_.first_byte(panel), bytes = product_.bytes(panel);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(out.data + r * out.row_bytes + begin, y.data + r * y.row_bytes + begin, bytes);
        if (!added.empty()) added.add(panel, 0, rows, product_.columns(panel), {out.data + begin, out.row_bytes});
    }
}

void Product::run_updated(int64_t rows, const Rows& x, const Rows& weight, const Rows& out, const Update& update,
                          const Panels& panels, const char* next, Beside* beside) const {
    const int64_t count = blocks(rows);
    alignas(kLine) char results[kMostTileRows * kPanel * sizeof(float)];
    for (int64_t b = 0; b < count; ++b) {
        const int64_t first = share(rows, b, count), last = share(rows, b + 1, count);
        const char* then = b + 1 < count ? reinterpret_cast<const char*>(panel(weight, panels.first)) : next;
        PanelUpdate added(*update_, adapters_, update, {first, last}, panels);
        const auto visit = [&](Tile& tile, int64_t row, int tall, int64_t number) {
            char* const to = out.data + row * out.row_bytes + first_byte(number);
            if (added.empty() || gate_ == nullptr) {
                tile.out = to;
                tile.out_bytes = out.row_bytes;
                multiply(tile, tall);
            } else {
                tile.out = results;
                tile.out_bytes = kPanel * out_size_;
                compute(tile, tall);
            }
            if (added.empty()) return;
            added.add(number, row, tall, columns(number), {tile.out, tile.out_bytes});
            if (gate_ != nullptr) gate_(tall, results, to, out.row_bytes);
        };
        each_tile_of({first, last}, x, weight, panels, then, beside, visit);
    }
}

}  // namespace hpcdecode::ops
