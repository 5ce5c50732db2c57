// Multiplies rows by the weights of their experts on every kernel this machine has and on several threads, for the
// sanitizers to watch, against plain loops. A failed check prints where and what, and the exit status is 1.
#include <algorithm>
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

constexpr int64_t kInputs = 40, kOutputs = 70, kExperts = 5, kFirst = 2;

std::mt19937 random_bits(3);

std::vector<float> numbers(int64_t count) {
    std::uniform_int_distribution<int> whole(-4, 4);  // so that sums are exact, in whatever order
    std::vector<float> made(count);
    for (float& x : made) x = static_cast<float>(whole(random_bits));
    return made;
}

Rows rows_of(std::vector<float>& data, int64_t columns) {
    return {reinterpret_cast<char*>(data.data()), columns * static_cast<int64_t>(sizeof(float))};
}

Rows rows_of(std::vector<int64_t>& data, int64_t columns) {
    return {reinterpret_cast<char*>(data.data()), columns * static_cast<int64_t>(sizeof(int64_t))};
}

// Weights of all experts, and of all adapters' experts, each in panels of its own.
std::vector<float> packed(const std::vector<float>& weight, int64_t count, int64_t bytes, int64_t inputs) {
    std::vector<float> made(count * bytes / sizeof(float), 0.0f);
    const std::vector<float> zeros(kOutputs);
    for (int64_t e = 0; e < count; ++e) {
        const WeightRows rows{reinterpret_cast<const char*>(weight.data() + e * kOutputs * inputs),
                              inputs * static_cast<int64_t>(sizeof(float)), kOutputs};
        auto* out = reinterpret_cast<uint32_t*>(made.data() + e * bytes / sizeof(float));
        pack_weights({rows}, {reinterpret_cast<const uint32_t*>(zeros.data())}, inputs, kOutputs, out, 1);
    }
    return made;
}

// adapters: Number of them, or 0 for weights of experts alone.
void test_rows(const std::string& isa, int64_t tokens, int64_t choices, bool shared, int threads, int64_t adapters) {
    const Product one(Type::f32, Type::f32, kInputs, kOutputs, isa);
    const ExpertProduct work(one, kExperts, kFirst, choices, shared, adapters);
    const Chain product({{work, adapters ? std::vector{0, 1, 2, 4, 3} : std::vector{0, 1, 2, 3}}}, 5, {});
    const int64_t weights = kExperts * std::max<int64_t>(adapters, 1);
    const std::vector<float> weight = numbers(weights * kOutputs * kInputs);
    std::vector<float> panels = packed(weight, weights, one.weight_bytes(), kInputs);
    std::vector<float> x = numbers(tokens * (shared ? 1 : choices) * kInputs), y(tokens * choices * kOutputs, 99.0f);
    std::uniform_int_distribution<int64_t> any(0, kFirst + kExperts + 1);
    std::vector<int64_t> experts(tokens * choices), of_tokens(tokens);
    for (int64_t& e : experts) e = any(random_bits);
    for (int64_t& a : of_tokens) a = any(random_bits) % (adapters + 2) - 1;
    product.run(tokens, threads,
                {rows_of(x, (shared ? 1 : choices) * kInputs), rows_of(experts, choices), rows_of(panels, 0),
                 rows_of(y, choices * kOutputs), rows_of(of_tokens, 1)},
                nullptr);
    int64_t wrong = 0;
    for (int64_t r = 0; r < tokens * choices; ++r) {
        const int64_t e = experts[r] - kFirst, a = adapters ? of_tokens[r / choices] : 0;
        const bool known = e >= 0 && e < kExperts && a >= 0 && a < std::max<int64_t>(adapters, 1);
        const float* row = x.data() + (shared ? r / choices : r) * kInputs;
        for (int64_t o = 0; o < kOutputs; ++o) {
            float sum = 0;
            for (int64_t i = 0; i < kInputs && known; ++i)
                sum += row[i] * weight[((a * kExperts + e) * kOutputs + o) * kInputs + i];
            wrong += y[r * kOutputs + o] != sum;
        }
    }
    CHECK(wrong == 0, "%s, %ld tokens of %ld, shared %d, %d threads, %ld adapters: %ld", isa.c_str(),
          static_cast<long>(tokens), static_cast<long>(choices), shared, threads, static_cast<long>(adapters),
          static_cast<long>(wrong));
}

// Adapters add B h to the rows of experts; h has kLow numbers.
void test_updates(const std::string& isa, int64_t tokens, int64_t choices, int threads) {
    constexpr int64_t kLow = 16, kAdapters = 3;
    const auto added = std::make_shared<const Product>(Type::f32, Type::f32, kLow, kOutputs, isa);
    const Product one(Type::f32, Type::f32, kInputs, kOutputs, isa, {}, WeightForm::plain, 1, added,
                      kAdapters * kExperts);
    const Chain product({{ExpertProduct(one, kExperts, kFirst, choices, true, 0), {0, 1, 2, 4, 5, 6, 3}}}, 7, {});
    const std::vector<float> weight = numbers(kExperts * kOutputs * kInputs);
    const std::vector<float> b = numbers(kAdapters * kExperts * kOutputs * kLow);
    std::vector<float> panels = packed(weight, kExperts, one.weight_bytes(), kInputs);
    std::vector<float> b_panels = packed(b, kAdapters * kExperts, added->weight_bytes(), kLow);
    std::vector<float> x = numbers(tokens * kInputs), low = numbers(tokens * choices * kLow);
    std::vector<float> y(tokens * choices * kOutputs, 99.0f);
    std::uniform_int_distribution<int64_t> any(0, kFirst + kExperts + 1);
    std::vector<int64_t> experts(tokens * choices), of_tokens(tokens);
    for (int64_t& e : experts) e = any(random_bits);
    for (int64_t& a : of_tokens) a = any(random_bits) % (kAdapters + 1) - 1;
    product.run(tokens, threads,
                {rows_of(x, kInputs), rows_of(experts, choices), rows_of(panels, 0), rows_of(y, choices * kOutputs),
                 rows_of(of_tokens, 1), rows_of(low, choices * kLow), rows_of(b_panels, 0)},
                nullptr);
    int64_t wrong = 0;
    for (int64_t r = 0; r < tokens * choices; ++r) {
        const int64_t e = experts[r] - kFirst, a = of_tokens[r / choices];
        const bool known = e >= 0 && e < kExperts;
        for (int64_t o = 0; o < kOutputs; ++o) {
            float sum = 0;
            for (int64_t i = 0; i < kInputs && known; ++i)
                sum += x[r / choices * kInputs + i] * weight[(e * kOutputs + o) * kInputs + i];
            for (int64_t i = 0; i < kLow && known && a >= 0; ++i)
                sum += low[r * kLow + i] * b[((a * kExperts + e) * kOutputs + o) * kLow + i];
            wrong += y[r * kOutputs + o] != sum;
        }
    }
    CHECK(wrong == 0, "%s, %ld tokens of %ld, %d threads: %ld updated", isa.c_str(), static_cast<long>(tokens),
          static_cast<long>(choices), threads, static_cast<long>(wrong));
}

void test_refusals(const std::string& isa) {
    const auto refused = [&](int64_t experts, int64_t heads, int64_t choices = 2) {
        try {
            ExpertProduct(Product(Type::f32, Type::f32, 4, 32, isa, {}, WeightForm::plain, heads), experts, 0, choices,
                          true, 0);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused(0, 1) && refused(3, 2) && refused(3, 1, 0) && !refused(3, 1), "%s", isa.c_str());
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
            for (int64_t tokens : {0, 1, 30, 400})
                for (int64_t choices : {1, 3})
                    for (bool shared : {false, true})
                        for (int64_t adapters : {0, 3}) test_rows(isa, tokens, choices, shared, threads, adapters);
        for (int threads : {1, 2, 5})
            for (int64_t tokens : {0, 1, 30, 400}) test_updates(isa, tokens, 3, threads);
        test_refusals(isa);
    }
    return report("experts_test");
}
