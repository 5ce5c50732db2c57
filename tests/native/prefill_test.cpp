// Runs the attention of prompts on every kernel this machine has, for the sanitizers to watch, against the KV cache's
// own attention. A failed check prints where and what, and the exit status is 1.
#include "prefill.h"

#include <sched.h>

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
    Data q(length, s.q_columns()), k(length, s.kv_heads * s.k_dim), v(length, s.kv_heads * s.v_dim),
        out(length, s.q_heads * s.v_dim);
    const std::vector<float> sinks(s.q_heads, 0.5f), expected = by_store(s, length, q, k, v, sinks);
    Prefill p({s}, type, make_workers(false, 2, {}), isa);
    std::vector<uint8_t> packed(p.packed_bytes(0, length), 255);
    int64_t at = 0;
    for (int n : counts) {
        p.attend(0, {{{packed.data(), static_cast<int64_t>(packed.size()), at, n, 0}},
                     q.matrix(type, at, n),
                     k.matrix(type, at, n),
                     v.matrix(type, at, n),
                     out.matrix(type, at, n),
                     s.sinks ? sinks.data() : nullptr,
                     static_cast<int64_t>(sinks.size())});
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

// The results of a layer with rows that decode, and prompts of which K and V are appended, too.
struct Mixed {
    std::vector<float> decodes, prompts;
    std::vector<uint8_t> appended;
};

// together: In one region, else one after the other.
Mixed mixed(const std::string& isa, ActType type, KvType kv_type, const LayerShape& s, bool together, int threads,
            const std::vector<int>& nodes) {
    random_bits.seed(5);
    const std::vector<int32_t> held = {1, 90, 1300}, ones = {1, 1, 1}, slots = {0, 1, 2};
    const std::vector<int32_t> counts = {1, 300, 70}, prompt_slots = {3, 4, 5};
    const int64_t n = 3, tokens = 371;
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &allowed)) ++cpu;
    const std::vector<int> cpus(nodes.size(), cpu);
    KvCache cache({s}, {kv_type, 4096, 6, 64, threads, cpus, isa, nodes});
    Prefill prompts({s}, type, cache.workers(), isa);
    cache.extend(slots.data(), held.data(), 3);
    Data before(1391, s.kv_columns()), qkv(n, s.row_columns()), q(tokens, s.q_columns()), kv(tokens, s.kv_columns()),
        o(n, s.out_columns()), out(tokens, s.out_columns());
    cache.append(0, slots.data(), held.data(), 3, before.matrix(type, 0, 1391));
    cache.extend(slots.data(), ones.data(), 3);
    cache.extend(prompt_slots.data(), counts.data(), 3);
    const std::vector<float> sinks(s.q_heads, 0.5f);
    const float* sink = s.sinks ? sinks.data() : nullptr;
    const int64_t sink_count = s.sinks ? s.q_heads : 0;
    std::vector<std::vector<uint8_t>> packed;
    PromptRows rows{{},
                    q.matrix(type, 0, tokens),
                    kv.matrix(type, 0, tokens),
                    kv.matrix(type, 0, tokens),
                    out.matrix(type, 0, tokens),
                    sink,
                    sink_count};
    rows.k.columns = int64_t{s.kv_heads} * s.k_dim;
    rows.v.columns = int64_t{s.kv_heads} * s.v_dim;
    rows.v.data = const_cast<uint8_t*>(at(kv.matrix(type, 0, tokens), 0, rows.k.columns));
    for (int32_t count : counts) packed.emplace_back(prompts.packed_bytes(0, count), 255);
    for (int i = 0; i < 3; ++i)
        rows.chunks.push_back({packed[i].data(), static_cast<int64_t>(packed[i].size()), 0, counts[i], i == 1 ? 5 : 0});
    const LayerRows beside{0,
                           prompt_slots.data(),
                           counts.data(),
                           3,
                           kv.matrix(type, 0, tokens),
                           slots.data(),
                           ones.data(),
                           3,
                           qkv.matrix(type, 0, n),
                           o.matrix(type, 0, n),
                           sink,
                           sink_count};
    if (together) {
        for (int round = 0; round < 3; ++round) prompts.attend(0, rows, &cache, &beside);
    } else {
        cache.append(0, prompt_slots.data(), counts.data(), 3, beside.kv);
        cache.attend(0, slots.data(), ones.data(), 3, beside.qkv, beside.out, sink, sink_count);
        prompts.attend(0, rows);
    }
    Mixed results;
    for (size_t i = 0; i < o.floats.size(); ++i) results.decodes.push_back(o.value(type, i));
    for (size_t i = 0; i < out.floats.size(); ++i) results.prompts.push_back(out.value(type, i));
    results.appended.resize(cache.pool().block_bytes() * (300 / 64));
    cache.copy_out(4, 0, results.appended.data(), results.appended.size());
    return results;
}

void mixed_case(const std::string& isa, ActType type, KvType kv_type, const LayerShape& s) {
    const Mixed apart = mixed(isa, type, kv_type, s, false, 1, {});
    for (const std::vector<int>& nodes : {std::vector<int>{}, std::vector<int>{1, 0, 1}}) {
        const Mixed together = mixed(isa, type, kv_type, s, true, 3, nodes);
        if (together.decodes == apart.decodes && together.prompts == apart.prompts &&
            together.appended == apart.appended)
            continue;
        std::printf("%s, activations of type %d, KV of type %d: a region differs\n", isa.c_str(),
                    static_cast<int>(type), static_cast<int>(kv_type));
        ++failures;
    }
}

void rejected() {
    const LayerShape s{1, 4, 4, 1, 1.0f, {}, 0, false};
    KvCache cache({s}, {KvType::kF32, 64, 2, 16, 1, {}, ""}), other({s}, {KvType::kF32, 64, 2, 16, 1, {}, ""});
    Prefill prompts({s}, ActType::kF32, cache.workers(), "");
    const int32_t slot = 0, one = 1;
    cache.extend(&slot, &one, 1);
    Data rows(1, 12), out(1, 4);
    const PromptRows none{{},
                          rows.matrix(ActType::kF32, 0, 0),
                          rows.matrix(ActType::kF32, 0, 0),
                          rows.matrix(ActType::kF32, 0, 0),
                          out.matrix(ActType::kF32, 0, 0),
                          nullptr,
                          0};
    PromptRows empty = none;
    empty.q.columns = empty.k.columns = empty.v.columns = 4;
    Matrix kv = rows.matrix(ActType::kF32, 0, 1);
    kv.columns = 8;
    const LayerRows twice{
        0,       &slot, &one, 1, kv, &slot, &one, 1, rows.matrix(ActType::kF32, 0, 1), out.matrix(ActType::kF32, 0, 1),
        nullptr, 0};
    for (KvCache* used : {&cache, &other}) {
        try {
            prompts.attend(0, empty, used, &twice);
            std::printf("a slot in both lists, or another KV cache, was accepted\n");
            ++failures;
        } catch (const std::invalid_argument&) {
        }
    }
}

}  // namespace

int main() {
    LayerShape profiles{2, 40, 24, 6, 0.2f, {100}, 0, true}, linear{1, 64, 64, 3, 0.2f, {}, 0, false};
    profiles.bias = PositionBias::of(3, std::vector<float>(3 * 77, 0.3f));
    linear.bias = PositionBias::of(2, {});
    linear.row_sinks = true;
    const LayerShape shapes[] = {
        {2, 64, 64, 8, 0.125f, {}, 0, false},
        {1, 33, 50, 3, 0.2f, {40}, 5.0f, true},
        {1, 64, 64, 3, 0.2f, {40, true}, 0, false},
        {2, 7, 130, 2, 0.4f, {}, 0, false},
        profiles,
        linear,
    };
    for (const std::string& isa : supported_isas())
        for (ActType type : {ActType::kF32, ActType::kBF16})
            for (const LayerShape& s : shapes)
                for (const std::vector<int>& counts : {std::vector<int>{150}, std::vector<int>{1, 70, 5, 64}})
                    prompt_case(isa, type, s, counts);
    const LayerShape sinks{2, 40, 24, 6, 0.2f, {100}, 5.0f, true};
    for (const std::string& isa : supported_isas())
        for (int type = 0; type < kNumKvTypes; ++type) {
            mixed_case(isa, ActType::kBF16, static_cast<KvType>(type), shapes[0]);
            if (type % 3 == 0) mixed_case(isa, ActType::kF32, static_cast<KvType>(type), sinks);
            if (type % 3 == 1) mixed_case(isa, ActType::kBF16, static_cast<KvType>(type), linear);
        }
    rejected();
    std::printf(failures == 0 ? "prefill tests passed\n" : "%d prefill checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}
