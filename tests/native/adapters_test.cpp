// Updates rows by their adapters on every kernel this machine has and on several threads, for the sanitizers to watch,
// against plain loops. A failed check prints where and what, and the exit status is 1.
#include "adapters.h"

#include <cmath>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "chain.h"
#include "check.h"
#include "packed_weights.h"

using namespace hpcdecode::ops;

namespace {

constexpr int64_t kInputs = 40, kRank = 16, kOutputs = 96, kAdapters = 3;

std::mt19937 random_bits(5);

std::vector<float> numbers(int64_t count) {
    std::uniform_int_distribution<int> whole(-3, 3);  // so that sums are exact, in whatever order
    std::vector<float> made(count);
    for (float& x : made) x = static_cast<float>(whole(random_bits));
    return made;
}

template <class T>
Rows rows_of(std::vector<T>& data, int64_t columns) {
    return {reinterpret_cast<char*>(data.data()), columns * static_cast<int64_t>(sizeof(T))};
}

// Weights [count, outputs, inputs], packed one after the other.
std::vector<float> packed(const std::vector<float>& weight, int64_t count, int64_t outputs, int64_t inputs,
                          int64_t bytes) {
    std::vector<float> made(count * bytes / sizeof(float), 0.0f);
    const std::vector<float> zeros(outputs);
    for (int64_t a = 0; a < count; ++a) {
        const WeightRows rows{reinterpret_cast<const char*>(weight.data() + a * outputs * inputs),
                              inputs * static_cast<int64_t>(sizeof(float)), outputs};
        auto* out = reinterpret_cast<uint32_t*>(made.data() + a * bytes / sizeof(float));
        pack_weights({rows}, {reinterpret_cast<const uint32_t*>(zeros.data())}, inputs, outputs, out, 1);
    }
    return made;
}

// y = W x + B_a (A_a x), by a chain of an AdapterProduct and a GEMM with an update, or an AdapterSum behind the GEMM.
void test_rows(const std::string& isa, int64_t tokens, int threads, bool apart) {
    const Product low(Type::f32, Type::f32, kInputs, kRank, isa), high(Type::f32, Type::f32, kRank, kOutputs, isa);
    const Product plain(Type::f32, Type::f32, kInputs, kOutputs, isa);
    const Product whole(Type::f32, Type::f32, kInputs, kOutputs, isa, {}, WeightForm::plain, 1,
                        std::make_shared<const Product>(high), kAdapters);
    const std::vector<float> w = numbers(kOutputs * kInputs), a = numbers(kAdapters * kRank * kInputs),
                             b = numbers(kAdapters * kOutputs * kRank);
    std::vector<float> w_panels = packed(w, 1, kOutputs, kInputs, plain.weight_bytes()),
                       a_panels = packed(a, kAdapters, kRank, kInputs, low.weight_bytes()),
                       b_panels = packed(b, kAdapters, kOutputs, kRank, high.weight_bytes());
    std::vector<float> x = numbers(tokens * kInputs), y(tokens * kOutputs, 99.0f);
    std::uniform_int_distribution<int64_t> any(-2, kAdapters);  // others than 0, 1 and 2 stand for none
    std::vector<int64_t> adapters(tokens);
    for (int64_t& each : adapters) each = any(random_bits);
    std::vector<Stage> stages{{AdapterProduct(low, kAdapters), {2, 0, 3, 6}}};  // x, w, adapters, a, b, y; h, W x
    if (apart) {
        stages.push_back({plain, {0, 1, 7}});
        stages.push_back({AdapterSum(high, kAdapters), {2, 7, 6, 4, 5}});
    } else {
        stages.push_back({whole, {0, 1, 2, 6, 4, 5}});
    }
    constexpr int64_t kH = kRank * sizeof(float), kY = kOutputs * sizeof(float);
    const Chain chain(stages, 6, {{kH, 0}, {kY, kH}});
    const std::vector<Rows> given{rows_of(x, kInputs),  rows_of(w_panels, 0), rows_of(adapters, 1),
                                  rows_of(a_panels, 0), rows_of(b_panels, 0), rows_of(y, kOutputs)};
    chain.run(tokens, threads, given, nullptr);
    int64_t wrong = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t own = adapters[t];
        std::vector<float> h(kRank);
        for (int64_t r = 0; r < kRank && own >= 0 && own < kAdapters; ++r)
            for (int64_t i = 0; i < kInputs; ++i) h[r] += x[t * kInputs + i] * a[(own * kRank + r) * kInputs + i];
        for (int64_t o = 0; o < kOutputs; ++o) {
            float sum = 0;
            for (int64_t i = 0; i < kInputs; ++i) sum += x[t * kInputs + i] * w[o * kInputs + i];
            for (int64_t r = 0; r < kRank && own >= 0 && own < kAdapters; ++r)
                sum += h[r] * b[(own * kOutputs + o) * kRank + r];
            wrong += y[t * kOutputs + o] != sum;
        }
    }
    CHECK(wrong == 0, "%s, %ld tokens, %d threads, apart %d: %ld", isa.c_str(), static_cast<long>(tokens), threads,
          apart, static_cast<long>(wrong));
}

void test_refusals(const std::string& isa) {
    const Product one(Type::f32, Type::f32, 4, 32, isa), other(Type::f32, Type::f32, 4, 64, isa);
    const auto refused = [&](auto make) {
        try {
            make();
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    const auto updated = [&](const Product& by, int64_t adapters) {
        return refused([&] {
            Product(Type::f32, Type::f32, 8, 32, isa, {}, WeightForm::plain, 1, std::make_shared<const Product>(by),
                    adapters);
        });
    };
    CHECK(updated(other, 2) && updated(one, 0) && !updated(one, 2), "%s", isa.c_str());
    CHECK(refused([&] { AdapterProduct(one, 0); }) && refused([&] { AdapterSum(one, 0); }), "%s", isa.c_str());
}

}  // namespace

int main() {
    std::vector<std::string> isas;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas.push_back("avx2");
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) isas.push_back("avx512");
#endif
    for (const std::string& isa : isas) {
        for (int threads : {1, 2, 5})
            for (int64_t tokens : {1, 2, 30, 400})
                for (bool apart : {false, true}) test_rows(isa, tokens, threads, apart);
        test_refusals(isa);
    }
    return report("adapters_test");
}
