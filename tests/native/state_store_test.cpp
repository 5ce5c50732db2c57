// Exercises the state store, its threads and its kernels on every ISA of this machine, for the sanitizers to watch.
#include "state_store.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

#include "check.h"
#include "exact_states.h"
#include "isa.h"

using namespace hpcdecode;

namespace {

const RecurrentShape kShapes[] = {
    {4, 2, 32, 64, 4, true, true, true, 0.2f, 1, true, false},     // Gated DeltaNet
    {3, 3, 20, 24, 4, true, true, true, 0.2f, 20, true, false},    // KDA
    {6, 1, 16, 80, 4, true, false, false, 1.0f, 1, true, false},   // Mamba-2
    {70, 1, 16, 1, 0, false, false, false, 1.0f, 16, true, true},  // Mamba-1
    {20, 2, 5, 1, 2, false, true, true, 0.5f, 1, true, false},     // lanes with the delta rule
    {3, 1, 0, 13, 3, false, false, false, 1.0f, 1, false, false},  // a convolution alone
    {2, 1, 7, 130, 1, false, false, true, 0.5f, 7, false, false},  // decays of rows, no beta
    {4, 2, 9, 5, 0, false, true, false, 0.5f, 9, true, true},      // decays of rows by rates
};

// Takes a sequence through a layer in chunks, beside others, with exact-size heap buffers. Short chunks are filled up
// with `wrong` tokens of their own or fewer, which are dropped again.
template <class Act>
std::vector<Act> in_chunks(const RecurrentShape& s, const RecurrentWeights& w, const std::vector<Act>& rows,
                           const std::string& isa, int threads, const std::vector<int32_t>& chunks, int wrong = 0) {
    const ActType type = sizeof(Act) == 4 ? ActType::kF32 : ActType::kBF16;
    StateStore store({s}, {w}, {{type, ActType::kF32}, 4, threads, {}, isa, {}, false, nullptr, wrong});
    const int64_t columns = s.row_columns(type);
    std::vector<Act> out;
    int64_t t = 0;
    for (int32_t count : chunks) {
        const int32_t more = count > 0 ? std::max(wrong + 1 - count, 0) : 0;
        const std::vector<int32_t> slots = {3, 1}, counts = {2, count + more};
        std::vector<Act> in(rows.begin(), rows.begin() + 2 * columns);
        in.insert(in.end(), rows.begin() + t * columns, rows.begin() + (t + count) * columns);
        in.insert(in.end(), rows.begin(), rows.begin() + more * columns);
        const int64_t all = 2 + count + more;
        std::vector<Act> part(all * s.out_columns());
        store.extend(slots.data(), counts.data(), 2);
        store.run(0, slots.data(), counts.data(), 2, {in.data(), type, all, columns, columns},
                  {part.data(), type, all, s.out_columns(), s.out_columns()});
        out.insert(out.end(), part.begin() + 2 * s.out_columns(), part.begin() + (2 + count) * s.out_columns());
        t += count;
        if (more > 0) store.truncate(1, t);
    }
    store.check();
    return out;
}

void kernels() {
    for (const RecurrentShape& s : kShapes) {
        constexpr int kTokens = 50;
        const RecurrentWeights w = weights_of(s);
        const std::vector<float> rows = rows_of(s, kTokens);
        const std::vector<uint16_t> narrow = narrowed(s, rows);
        const std::vector<double> expected = exact_outputs(s, w, rows, kTokens);
        for (const std::string& isa : supported_isas()) {
            const std::vector<float> out = in_chunks(s, w, rows, isa, 1, {kTokens});
            double error = 0, size = 0;
            for (size_t i = 0; i < out.size(); ++i) {
                error = std::fmax(error, std::isfinite(out[i]) ? std::fabs(expected[i] - out[i]) : INFINITY);
                size = std::fmax(size, std::fabs(expected[i]));
            }
            CHECK(error <= 2e-5 * size, "%s k_dim %d v_dim %d: error %g of %g", isa.c_str(), s.k_dim, s.v_dim, error,
                  size);
            const std::vector<int32_t> ones(kTokens, 1);
            CHECK(out == in_chunks(s, w, rows, isa, 3, ones), "%s k_dim %d: by token", isa.c_str(), s.k_dim);
            CHECK(in_chunks(s, w, narrow, isa, 1, {kTokens}) == in_chunks(s, w, narrow, isa, 2, ones),
                  "%s k_dim %d: bfloat16 by token", isa.c_str(), s.k_dim);
            CHECK(out == in_chunks(s, w, rows, isa, 2, {1, 2, 40, 3, 0, 4}), "%s k_dim %d: by chunks", isa.c_str(),
                  s.k_dim);
            CHECK(out == in_chunks(s, w, rows, isa, 3, {1, 4, 2, 36, 1, 0, 5, 1}, 5), "%s k_dim %d: beside guesses",
                  isa.c_str(), s.k_dim);
        }
    }
}

// Compressors against means in double, by tokens and in chunks.
void compressors() {
    for (const bool overlaps : {false, true}) {
        const RecurrentShape s{21, 1, 0, 1, 0, false, false, false, 1.0f, 1, false, false, 4, overlaps};
        constexpr int kTokens = 30;
        const RecurrentWeights w;
        const int64_t columns = s.row_columns(ActType::kF32), channels = s.channels();
        const std::vector<float> rows = normal(kTokens * columns);
        for (const std::string& isa : supported_isas()) {
            const std::vector<float> out = in_chunks(s, w, rows, isa, 1, {kTokens});
            for (int t = 3; t < kTokens; t += 4)  // where windows end
                for (int h = 0; h < s.heads; ++h) {
                    double sum = 0, total = 0;
                    for (int own = overlaps && t > 4 ? t - 7 : t - 3; own <= t; ++own) {
                        const int64_t at = own * columns + (overlaps && own > t - 4 ? s.heads : 0) + h;
                        const double weight = std::exp(double{rows[at + channels]});
                        sum += weight;
                        total += weight * rows[at];
                    }
                    const double error = std::fabs(out[t * s.heads + h] - total / sum);
                    CHECK(error < 1e-5, "%s token %d: mean %g from %g", isa.c_str(), t, error, total / sum);
                }
            CHECK(out == in_chunks(s, w, rows, isa, 3, std::vector<int32_t>(kTokens, 1)), "%s: means by token",
                  isa.c_str());
            CHECK(out == in_chunks(s, w, rows, isa, 2, {1, 2, 20, 3, 0, 4}), "%s: means by chunks", isa.c_str());
            CHECK(out == in_chunks(s, w, rows, isa, 2, {1, 2, 20, 3, 0, 4}, 3), "%s: means beside guesses",
                  isa.c_str());
        }
    }
}

void random_store_verbs() {
    const RecurrentShape &a = kShapes[4], &b = kShapes[5];
    StateStore store({a, b}, {weights_of(a), weights_of(b)},
                     {{ActType::kF32, ActType::kF32}, 9, 2, {}, "", {}, false, nullptr, 2});
    std::set<int> open;
    for (int i = 0; i < 2000; ++i) {
        const int32_t slot = random_bits() % 10, count = random_bits() % 5;
        const int other = random_bits() % 9, verb = random_bits() % 10;
        try {
            if (verb < 5) {
                store.extend(&slot, &count, 1);
                open.insert(slot);
                for (int layer = 0; layer < 2; ++layer) {
                    const RecurrentShape& s = layer == 0 ? a : b;
                    std::vector<float> rows = rows_of(s, count), out(count * s.out_columns());
                    store.run(layer, &slot, &count, 1, matrix(rows, count, s.row_columns(ActType::kF32)),
                              matrix(out, count, s.out_columns()));
                }
            } else if (verb < 7) {
                store.truncate(slot, store.length(slot) - 1);
            } else if (verb < 8) {
                store.fork(slot, other);
                open.insert(other);
            } else {
                store.release(&slot, 1);
                open.erase(slot);
            }
        } catch (const std::invalid_argument&) {
        }
        CHECK(store.open_slots() == static_cast<int>(open.size()), "%d open, expected %d", store.open_slots(),
              static_cast<int>(open.size()));
        store.check();
    }
}

void rejected() {
    const RecurrentShape& s = kShapes[0];
    const RecurrentWeights w = weights_of(s);
    StateStore store({s}, {w}, {{ActType::kF32, ActType::kF32}, 2, 1, {}, "", {}, false, nullptr});
    std::vector<float> rows = rows_of(s, 1), out(s.out_columns());
    const Matrix in = matrix(rows, 1, s.row_columns(ActType::kF32)), result = matrix(out, 1, s.out_columns());
    const int32_t slot = 0, one = 1;
    const auto refused = [&](const char* what, const auto& call) {
        try {
            call();
            CHECK(false, "%s was accepted", what);
        } catch (const std::invalid_argument&) {
        }
    };
    refused("a closed slot", [&] { store.run(0, &slot, &one, 1, in, result); });
    store.extend(&slot, &one, 1);
    refused("a layer too many", [&] { store.run(1, &slot, &one, 1, in, result); });
    store.run(0, &slot, &one, 1, in, result);
    refused("a second run", [&] { store.run(0, &slot, &one, 1, in, result); });
    refused("weights of another shape",
            [&] { StateStore({kShapes[3]}, {w}, {{ActType::kF32, ActType::kF32}, 2, 1, {}, "", {}, false, nullptr}); });
    CHECK(store.rewrite_seconds() > 0, "no time passed");
}

}  // namespace

int main() {
    kernels();
    compressors();
    random_store_verbs();
    rejected();
    return report("state_store");
}
