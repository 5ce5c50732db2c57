#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernel_api.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int64_t kBlock = 256;     // tokens
constexpr float kMost = 2.0f;       // more than any weight
constexpr uint32_t kFew = 1 << 14;  // different weights up to which a border is searched one by one

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float weight_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// A border of tokens ordered by falling weight. Before it are larger weights, and this weight with ids up to `last`.
struct Border {
    float weight;
    int64_t last;
};

class Row {
  public:
    Row(const KernelTable& table, int64_t vocabulary)
        : table_(table),
          size_(vocabulary),
          blocks_((vocabulary + kBlock - 1) / kBlock),
          weights_(vocabulary),
          sums_(blocks_),
          most_(blocks_) {}

    int64_t draw(const char* logits, Type type, const Draw& d) {
        table_.load[static_cast<int>(type)](size_, logits, weights_.data());
        const float top = table_.largest(size_, weights_.data());
        if (!std::isfinite(top)) return std::max_element(weights_.begin(), weights_.end()) - weights_.begin();
        for (int64_t b = 0; b < blocks_; ++b) {
            table_.weigh(count(b), top, 1.0f / d.temperature, block(b));
            most_[b] = table_.largest(count(b), block(b));
        }
        Border border{std::max(d.min_p, std::numeric_limits<float>::min()), size_};
        if (0 < d.top_k && d.top_k < size_) border.weight = std::max(border.weight, kth_largest(d.top_k));
        double total = sum(border);
        if (d.top_p < 1.0f) {
            border = share(border.weight, d.top_p * total);
            total = sum(border);
        }
        return pick(border, std::min(d.uniform * total, std::nextafter(total, 0.0)));
    }

  private:
    int64_t count(int64_t b) const { return std::min(kBlock, size_ - b * kBlock); }
    float* block(int64_t b) { return weights_.data() + b * kBlock; }

    // Returns the k-th largest weight. At least k blocks have a weight as large as the k-th largest of the blocks'
    // largest.
    float kth_largest(int64_t k) {
        float floor = std::numeric_limits<float>::min();
        if (k <= blocks_) {
            std::vector<float> most = most_;
            std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<float>());
            floor = std::max(floor, most[k - 1]);
        }
        std::vector<float> found;
        each(floor, kMost, [&](int64_t, float w) { found.push_back(w); });
        if (static_cast<int64_t>(found.size()) < k) return floor;
        std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<float>());
        return found[k - 1];
    }

    // Returns the first token, by falling weight, whose running sum reaches `wanted`, or else the last one from `floor`
    // on.
    Border share(float floor, double wanted) {
        uint32_t low = bits_of(floor), high = bits_of(1.0f) + 1;  // weights from `high` on are too few, from `low` not
        double above = 0.0;                                       // of those from `high` on
        while (high - low > kFew) {
            float floors[kFloors];
            double mass[kFloors] = {};
            const uint32_t step = (high - low) / (kFloors + 1), begin = low;
            for (int i = 0; i < kFloors; ++i) floors[i] = weight_of(begin + step * (i + 1));
            for (int64_t b = 0; b < blocks_; ++b)
                if (most_[b] >= floors[0]) table_.sums_from(count(b), block(b), floors, mass);
            for (int i = kFloors - 1; i >= 0 && low == begin; --i) {
                if (mass[i] >= wanted) {
                    low = bits_of(floors[i]);
                } else {
                    high = bits_of(floors[i]);
                    above = mass[i];
                }
            }
        }
        std::vector<Border> rest;
        each(weight_of(low), weight_of(high), [&](int64_t token, float w) { rest.push_back({w, token}); });
        std::stable_sort(rest.begin(), rest.end(),
                         [](const Border& a, const Border& b) { return a.weight > b.weight; });
        for (const Border& token : rest)
            if ((above += token.weight) >= wanted) return token;
        return {rest.empty() ? floor : rest.back().weight, size_};
    }

    template <class F>
    void each(float floor, float end, const F& visit) {
        const uint32_t low = bits_of(floor), span = bits_of(end) - low;  // one comparison, which is seldom true
        for (int64_t b = 0; b < blocks_; ++b) {
            if (most_[b] < floor) continue;
            const float* w = block(b);
            const int64_t n = count(b);
            for (int64_t i = 0; i < n; ++i)
                if (bits_of(w[i]) - low < span) visit(b * kBlock + i, w[i]);
        }
    }

    // Returns the least weight that is kept for a token of this id.
    static float floor_at(const Border& border, int64_t token) {
        return token <= border.last ? border.weight : std::nextafter(border.weight, kMost);
    }

    double sum(const Border& border) {
        double total = 0.0;
        for (int64_t b = 0; b < blocks_; ++b) {
            const int64_t first = b * kBlock, split = std::clamp<int64_t>(border.last + 1 - first, 0, count(b));
            const float *w = block(b), low = border.weight, high = std::nextafter(low, kMost);
            sums_[b] = table_.sum_from(split, w, low) + table_.sum_from(count(b) - split, w + split, high);
            total += sums_[b];
        }
        return total;
    }

    int64_t pick(const Border& border, double target) {
        int64_t b = 0, last = 0;
        for (; b < blocks_; ++b) {
            if (sums_[b] > 0.0) last = b;
            if (target < sums_[b]) break;
            target -= sums_[b];
        }
        b = std::min(b, last);  // rounding may end the sums before the target
        int64_t found = b * kBlock;
        for (int64_t i = 0; i < count(b); ++i) {
            const int64_t token = b * kBlock + i;
            const float w = block(b)[i];
            if (w < floor_at(border, token)) continue;
            found = token;
            target -= w;
            if (target < 0.0) break;
        }
        return found;
    }

    const KernelTable& table_;
    int64_t size_, blocks_;
    std::vector<float> weights_;
    std::vector<double> sums_;  // of what is left in a block
    std::vector<float> most_;   // the largest weight of a block
};

}  // namespace

std::vector<int64_t> draw(const Rows& logits, Type type, int64_t vocabulary, const std::vector<int64_t>& rows,
                          const std::vector<Draw>& draws, int threads, const std::string& isa) {
    std::vector<int64_t> tokens(draws.size());
    const KernelTable& table = kernels_for(isa);
    const auto draw_own = [&](int part, int parts) {
        Row row(table, vocabulary);
        const auto count = static_cast<int64_t>(draws.size());
        for (int64_t i = share(count, part, parts); i < share(count, part + 1, parts); ++i)
            tokens[i] = row.draw(logits.data + rows[i] * logits.row_bytes, type, draws[i]);
    };
    run_team(threads, static_cast<int>(draws.size()), draw_own);
    return tokens;
}

}  // namespace hpcdecode::ops
