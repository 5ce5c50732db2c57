// Multiplies rows by the weights of their experts on every kernel this machine has and on several threads, for the
// sanitizers to watch, against plain loops. A failed check prints where and what, and the exit status is 1.
#include <algorithm>
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

// Weights of all experts, each in panels of its own.
std::vector<float> packed(const std::vector<float>& weight, int64_t bytes) {
    std::vector<float> made(kExperts * bytes / sizeof(float), 0.0f);
    const std::vector<float> zeros(kOutputs);
    for (int64_t e = 0; e < kExperts; ++e) {
        const WeightRows rows{reinterpret_cast<const char*>(weight.data() + e * kOutputs * kInputs),
                              kInputs * static_cast<int64_t>(sizeof(float)), kOutputs};
        auto* out = reinterpret_cast<uint32_t*>(made.data() + e * bytes / sizeof(float));
        pack_weights({rows}, {reinterpret_cast<const uint32_t*>(zeros.data())}, kInputs, kOutputs, out, 1);
    }
    return made;
}

void test_rows(const std::string& isa, int64_t tokens, int64_t choices, bool shared, int threads) {
    const Product one(Type::f32, Type::f32, kInputs, kOutputs, isa);
    const Chain product({{ExpertProduct(one, kExperts, kFirst, choices, shared), {0, 1, 2, 3}}}, 4, {});
    const std::vector<float> weight = numbers(kExperts * kOutputs * kInputs);
    std::vector<float> panels = packed(weight, one.weight_bytes());
    std::vector<float> x = numbers(tokens * (shared ? 1 : choices) * kInputs), y(tokens * choices * kOutputs, 99.0f);
    std::uniform_int_distribution<int64_t> any(0, kFirst + kExperts + 1);
    std::vector<int64_t> experts(tokens * choices);
    for (int64_t& e : experts) e = any(random_bits);
    const Rows chosen{reinterpret_cast<char*>(experts.data()), choices * static_cast<int64_t>(sizeof(int64_t))};
    product.run(
        tokens, threads,
        {rows_of(x, (shared ? 1 : choices) * kInputs), chosen, rows_of(panels, 0), rows_of(y, choices * kOutputs)},
        nullptr);
    int64_t wrong = 0;
    for (int64_t r = 0; r < tokens * choices; ++r) {
        const int64_t e = experts[r] - kFirst;
        const float* row = x.data() + (shared ? r / choices : r) * kInputs;
        for (int64_t o = 0; o < kOutputs; ++o) {
            float sum = 0;
            for (int64_t i = 0; i < kInputs && e >= 0 && e < kExperts; ++i)
                sum += row[i] * weight[(e * kOutputs + o) * kInputs + i];
            wrong += y[r * kOutputs + o] != sum;
        }
    }
    CHECK(wrong == 0, "%s, %ld tokens of %ld, shared %d, %d threads: %ld", isa.c_str(), static_cast<long>(tokens),
          static_cast<long>(choices), shared, threads, static_cast<long>(wrong));
}

void test_refusals(const std::string& isa) {
    const auto refused = [&](int64_t experts, int64_t heads, int64_t choices = 2) {
        try {
            ExpertProduct(Product(Type::f32, Type::f32, 4, 32, isa, {}, WeightForm::plain, heads), experts, 0, choices,
                          true);
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
                    for (bool shared : {false, true}) test_rows(isa, tokens, choices, shared, threads);
        test_refusals(isa);
    }
    return report("experts_test");
}
