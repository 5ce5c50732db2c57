// Runs the attention of prompts on every kernel this machine has, for the sanitizers to watch, against the KV cache's
// own attention. A failed check prints where and what, and the exit status is 1.
#include "prefill.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "isa.h"

using namespace hpcdecode;

namespace {

int failures = 0;
std::mt19937 random_bits(11);

// A matrix of bfloat16 values in a buffer of exactly its size, as floats and as bfloat16.
struct Data {
    Data(int64_t rows, int64_t columns) : rows(rows), columns(columns), floats(rows * columns), halves(rows * columns) {
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < floats.size(); ++i) {
            uint32_t bits;
            floats[i] = normal(random_bits);
            std::memcpy(&bits, &floats[i], 4);
            bits &= 0xffff0000u;
            std::memcpy(&floats[i], &bits, 4);
            halves[i] = static_cast<uint16_t>(bits >> 16);
        }
    }
    Matrix matrix(ActType type, int64_t from, int64_t count) {
        void* data = type == ActType::kF32 ? static_cast<void*>(floats.data() + from * columns)
                                           : static_cast<void*>(halves.data() + from * columns);
        return {data, type, count, columns, columns};
    }
    float value(ActType type, size_t i) const {
        if (type == ActType::kF32) return floats[i];
        const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    int64_t rows, columns;
    std::vector<float> floats;
    std::vector<uint16_t> halves;
};

std::vector<float> by_store(const LayerShape& s, int length, const Data& q, const Data& k, const Data& v,
                            const std::vector<float>& sinks) {
    KvCache e({s}, {KvType::kF32, length, 1, 16, 1, {}, "generic"});
    const int32_t slot = 0, count = length;
    std::vector<float> rows, out(length * s.q_heads * s.v_dim);
    for (int i = 0; i < length; ++i)
        for (const Data* d : {&q, &k, &v})
            rows.insert(rows.end(), d->floats.begin() + i * d->columns, d->floats.begin() + (i + 1) * d->columns);
    const int64_t columns = q.columns + k.columns + v.columns, width = s.q_heads * s.v_dim;
    e.extend(&slot, &count, 1);
    e.attend(0, &slot, &count, 1, {rows.data(), ActType::kF32, length, columns, columns},
             {out.data(), ActType::kF32, length, width, width}, s.sinks ? sinks.data() : nullptr, sinks.size());
    return out;
}

void prompt_case(const std::string& isa, ActType type, const LayerShape& s, const std::vector<int>& counts) {
    int length = 0;
    for (int n : counts) length += n;
    Data q(length, s.q_heads * s.k_dim), k(length, s.kv_heads * s.k_dim), v(length, s.kv_heads * s.v_dim),
        out(length, s.q_heads * s.v_dim);
    const std::vector<float> sinks(s.q_heads, 0.5f), expected = by_store(s, length, q, k, v, sinks);
    Prefill p({s}, type, make_workers(false, 2, {}), isa);
    std::vector<uint8_t> packed(p.packed_bytes(0, length), 255);
    int64_t at = 0;
    for (int n : counts) {
        p.attend(0, {{packed.data(), static_cast<int64_t>(packed.size()), at, n, 0}}, q.matrix(type, at, n),
                 k.matrix(type, at, n), v.matrix(type, at, n), out.matrix(type, at, n),
                 s.sinks ? sinks.data() : nullptr, sinks.size());
        at += n;
    }
    double error = 0;
    for (size_t i = 0; i < expected.size(); ++i)
        error = std::fmax(error, std::fabs(out.value(type, i) - expected[i]));  // fmax skips NaN
    for (size_t i = 0; i < expected.size(); ++i)
        if (std::isnan(out.value(type, i))) error = 1e9;
    if (error < (type == ActType::kF32 ? 1e-4 : 4e-2)) return;
    std::printf("%s, activations of type %d, k_dim %d, v_dim %d: error %g\n", isa.c_str(), static_cast<int>(type),
                s.k_dim, s.v_dim, error);
    ++failures;
}

}  // namespace

int main() {
    const LayerShape shapes[] = {
        {2, 64, 64, 8, 0.125f, 0, 0, false},
        {1, 33, 50, 3, 0.2f, 40, 5.0f, true},
        {2, 7, 130, 2, 0.4f, 0, 0, false},
    };
    for (const std::string& isa : supported_isas())
        for (ActType type : {ActType::kF32, ActType::kBF16})
            for (const LayerShape& s : shapes)
                for (const std::vector<int>& counts : {std::vector<int>{150}, std::vector<int>{1, 70, 5, 64}})
                    prompt_case(isa, type, s, counts);
    std::printf(failures == 0 ? "prefill tests passed\n" : "%d prefill checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}
