#include "masks.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "team.h"

namespace hpcdecode::ops {

namespace {

constexpr int64_t kBits = 32;
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

void keep_allowed_of(float* logits, int64_t vocabulary, const uint32_t* mask) {
    bool left = false;  // whether one that is allowed is not -inf
    for (int64_t first = 0; first < vocabulary; first += kBits) {
        const int64_t count = std::min(kBits, vocabulary - first);
        const uint32_t word = mask[first / kBits];
        float* own = logits + first;
        if (word == 0) {
            std::fill_n(own, count, kForbidden);
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            own[i] = word >> i & 1 ? own[i] : kForbidden;
            left |= own[i] != kForbidden;
        }
    }
    for (int64_t i = 0; !left && i < vocabulary; ++i)
        if (mask[i / kBits] >> i % kBits & 1) logits[i] = 0;
}

}  // namespace

void keep_allowed(const Rows& logits, int64_t vocabulary, const std::vector<int64_t>& rows, const uint32_t* masks,
                  int64_t words, int threads) {
    if (words * kBits < vocabulary) {
        throw std::invalid_argument("masks: expected those of at least " + std::to_string(vocabulary) +
                                    " tokens, got " + std::to_string(words * kBits));
    }
    run_shares(threads, static_cast<int64_t>(rows.size()), [&](int64_t i) {
        auto* row = reinterpret_cast<float*>(logits.data + rows[i] * logits.row_bytes);
        keep_allowed_of(row, vocabulary, masks + i * words);
    });
}

}  // namespace hpcdecode::ops
