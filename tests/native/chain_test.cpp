// Runs chains of GEMMs, fused kernels and attention on every kernel this machine has and on several threads, for
// the sanitizers to watch, against plain loops. A failed check prints where and what, and the exit status is 1.
#include "chain.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

using namespace hpcdecode;
using namespace hpcdecode::ops;

namespace {

constexpr int64_t kIn = 40, kMiddle = 70, kOut = 33;  // columns: panels that are not full

std::mt19937 random_bits(3);

std::vector<float> numbers(int64_t count) {
    std::uniform_int_distribution<int> whole(-4, 4);  // so that sums are exact, in whatever order
    std::vector<float> made(count);
    for (float& x : made) x = static_cast<float>(whole(random_bits));
    return made;
}

// As model/panels.py has it.
std::vector<float> in_panels(const std::vector<float>& weight, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + kPanel - 1) / kPanel;
    std::vector<float> made(panels * (1 + inputs) * kPanel, 0.0f);
    for (int64_t o = 0; o < outputs; ++o)
        for (int64_t i = 0; i < inputs; ++i)
            made[((o / kPanel) * (1 + inputs) + 1 + i) * kPanel + o % kPanel] = weight[o * inputs + i];
    return made;
}

Rows rows_of(std::vector<float>& data, int64_t columns) {
    return {reinterpret_cast<char*>(data.data()), columns * static_cast<int64_t>(sizeof(float))};
}

// y = -x of `count` columns.
FusedKernel negation(int64_t count, const std::string& isa) {
    const View dense{0, {0, 0, 1}};
    const auto step = [&](Op op, View out, View a) {
        return Step{op, Type::f32, {1, 1, count}, out, a, {}, false, 0.0f};
    };
    return FusedKernel({},
                       {step(Op::load, dense, {0, {}}), step(Op::neg, dense, dense), step(Op::store, {1, {}}, dense)},
                       count, 2, isa);
}

// Adds the number of the sequence to every element, and counts the calls.
struct Numbers : RowAttention {
    int64_t sequences = 0;
    std::atomic<int64_t> done{0};
    int open = 0;

    void begin(int64_t count, int) override {
        sequences = count;
        ++open;
    }
    void attend(int layer, int, const SequenceRows& r) override {
        for (int64_t i = 0; i < r.count; ++i) {
            const auto* in = reinterpret_cast<const float*>(r.qkv + i * r.qkv_bytes);
            auto* out = reinterpret_cast<float*>(r.out + i * r.out_bytes);
            for (int64_t c = 0; c < kMiddle; ++c) out[c] = in[c] + static_cast<float>(layer + r.first + i * r.step);
        }
        done += r.count;
    }
    int64_t foresee(int, const SequenceRows& r, std::vector<Lines>& lines) const override {
        lines.push_back({reinterpret_cast<const char*>(r.qkv), reinterpret_cast<const char*>(r.qkv + r.qkv_bytes)});
        return std::min<int64_t>(r.count, 3);
    }
    void end() override { --open; }
};

void test_chain(const std::string& isa, int64_t tokens, int threads, bool attends) {
    const std::vector<float> first = numbers(kMiddle * kIn), second = numbers(kOut * kMiddle);
    std::vector<float> x = numbers(tokens * kIn), y(tokens * kOut, 99.0f);
    std::vector<float> w1 = in_panels(first, kMiddle, kIn), w2 = in_panels(second, kOut, kMiddle);
    const int64_t bytes = (kMiddle * 4 + 63) / 64 * 64;
    std::vector<Stage> stages;
    stages.push_back({Product(Type::f32, Type::f32, kIn, kMiddle, isa), {0, 1, 4}});
    stages.push_back({negation(kMiddle, isa), {4, 5}});
    if (attends) stages.push_back({Attention{7}, {5, 4}});
    stages.push_back({Product(Type::f32, Type::f32, kMiddle, kOut, isa), {attends ? 4 : 5, 2, 3}});
    const Chain chain(std::move(stages), 4, {{bytes, 0}, {bytes, bytes}});
    Rows panels1 = rows_of(w1, 0), panels2 = rows_of(w2, 0);
    Numbers attention;
    chain.run(tokens, threads, {rows_of(x, kIn), panels1, panels2, rows_of(y, kOut)}, attends ? &attention : nullptr);
    CHECK(attention.done == (attends ? tokens : 0) && attention.open == 0, "%s, %d threads", isa.c_str(), threads);
    int64_t wrong = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        std::vector<float> middle(kMiddle);
        for (int64_t o = 0; o < kMiddle; ++o) {
            for (int64_t i = 0; i < kIn; ++i) middle[o] -= x[t * kIn + i] * first[o * kIn + i];
            if (attends) middle[o] += static_cast<float>(7 + t);
        }
        for (int64_t o = 0; o < kOut; ++o) {
            float sum = 0;
            for (int64_t i = 0; i < kMiddle; ++i) sum += middle[i] * second[o * kMiddle + i];
            wrong += y[t * kOut + o] != sum;
        }
    }
    CHECK(wrong == 0, "%s, %ld tokens, %d threads, attention %d: %ld", isa.c_str(), static_cast<long>(tokens), threads,
          attends, static_cast<long>(wrong));
}

void test_fused_kernels_alone(int64_t tokens, int threads) {
    std::vector<float> x = numbers(tokens * kIn), y(tokens * kIn, 99.0f);
    const int64_t bytes = (kIn * 4 + 63) / 64 * 64;
    const FusedKernel negate = negation(kIn, "generic");
    const Chain chain({{negate, {0, 2}}, {negate, {2, 3}}, {negate, {3, 1}}}, 2, {{bytes, 0}, {bytes, bytes}});
    chain.run(tokens, threads, {rows_of(x, kIn), rows_of(y, kIn)}, nullptr);
    int64_t wrong = 0;
    for (int64_t i = 0; i < tokens * kIn; ++i) wrong += y[i] != -x[i];
    CHECK(wrong == 0, "%ld tokens, %d threads: %ld", static_cast<long>(tokens), threads, static_cast<long>(wrong));
}

void test_refusals() {
    const auto refused = [](auto call) {
        try {
            call();
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused([] { Chain({{negation(4, "generic"), {0, 2}}}, 1, {{64, 0}}); }), "a tensor that is not there");
    CHECK(refused([] { Chain({{negation(4, "generic"), {0}}}, 2, {}); }), "too few tensors");
    CHECK(refused([] { Product(Type::f32, Type::f32, 4, 4, "generic"); }), "no such product");
    std::vector<float> x(4), y(4);
    const Chain chain({{Attention{0}, {0, 1}}}, 2, {});
    CHECK(refused([&] { chain.run(1, 1, {rows_of(x, 4), rows_of(y, 4)}, nullptr); }), "no attention");
}

}  // namespace

int main() {
    std::vector<std::string> isas;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) isas.push_back("avx512");
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) isas.push_back("avx512_bf16");
#endif
    for (const std::string& isa : isas)
        for (int threads : {1, 2, 3, 5})
            for (int64_t tokens : {1, 3, 29, 113, 600})
                for (bool attends : {false, true}) test_chain(isa, tokens, threads, attends);
    for (int threads : {1, 2, 3})
        for (int64_t tokens : {1, 5, 600}) test_fused_kernels_alone(tokens, threads);
    test_refusals();
    return report("chain_test");
}
