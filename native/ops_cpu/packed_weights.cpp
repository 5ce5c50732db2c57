#include "packed_weights.h"

#include <algorithm>

#include "product.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int64_t kChunk = 64;  // words of a row at once, so that what they fill stays in the first level of the cache

struct Filling {
    std::vector<const uint32_t*> rows;  // of all outputs
    const std::vector<const uint32_t*>& heads;
    int64_t words;
    uint32_t* out;

    void panel(int64_t p) const {
        const int64_t first = p * kPanel, count = std::min<int64_t>(kPanel, rows.size() - first);
        uint32_t* to = out + p * (heads.size() + words) * kPanel;
        for (const uint32_t* head : heads) {
            std::copy_n(head + first, count, to);
            to += kPanel;
        }
        for (int64_t begin = 0; begin < words; begin += kChunk) {
            const int64_t end = std::min(begin + kChunk, words);
            for (int64_t j = 0; j < count; ++j) {
                const uint32_t* row = rows[first + j];
                for (int64_t w = begin; w < end; ++w) to[w * kPanel + j] = row[w];
            }
        }
    }
};

}  // namespace

int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

std::vector<const char*> rows_of(const std::vector<WeightRows>& parts, int64_t in_turn) {
    std::vector<const char*> rows;
    int64_t most = 0;
    for (const WeightRows& part : parts) most = std::max(most, part.count);
    for (int64_t first = 0; first < most; first += in_turn)
        for (const WeightRows& part : parts)
            for (int64_t i = first; i < std::min(first + in_turn, part.count); ++i)
                rows.push_back(part.data + i * part.row_bytes);
    return rows;
}

void pack_weights(const std::vector<WeightRows>& parts, const std::vector<const uint32_t*>& heads, int64_t words,
                  int64_t in_turn, uint32_t* out, int threads) {
    Filling filling{{}, heads, words, out};
    for (const char* row : rows_of(parts, in_turn)) filling.rows.push_back(reinterpret_cast<const uint32_t*>(row));
    run_shares(threads, panels_of(filling.rows.size()), [&](int64_t p) { filling.panel(p); });
}

}  // namespace hpcdecode::ops
