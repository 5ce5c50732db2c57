// Exercises the KV cache, its threads and every kernel this machine has, for the sanitizers to watch. No framework: a
// failed check prints where and what, and the exit status is 1.
#include "kv_cache.h"

#include <cmath>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <vector>

#include "bandwidth.h"
#include "check.h"
#include "isa.h"
#include "random_rows.h"

using namespace hpcdecode;

namespace {

// Returns what is added to a score by the distance to its key. mixes: Of the query head.
double bias_of(const PositionBias& b, const float* mixes, int64_t distance) {
    double sum = 0;
    for (int i = 0; i < b.dim; ++i) {
        if (b.extent == 0) sum -= double{mixes[i]} * static_cast<double>(distance);
        if (distance < b.extent) sum += double{mixes[i]} * (b.first() + i * b.stride())[b.extent - 1 - distance];
    }
    return sum;
}

// Decode attention of query head `head` of a row over rows of K and V of its KV head, in double.
std::vector<double> plain(const float* row, int head, const std::vector<const float*>& k,
                          const std::vector<const float*>& v, const LayerShape& s) {
    std::vector<double> w(k.size()), out(s.v_dim, 0.0);
    const float* q = row + head * s.k_dim;
    const double sink = s.row_sinks ? double{row[s.sink_column() + head]} : -1e300;
    double top = sink, total = 0;
    for (size_t t = 0; t < k.size(); ++t) {
        double dot = 0;
        for (int d = 0; d < s.k_dim; ++d) dot += double{q[d]} * k[t][d];
        w[t] = dot * s.scale;
        if (s.softcap > 0) w[t] = s.softcap * std::tanh(w[t] / s.softcap);
        const int64_t distance = static_cast<int64_t>(k.size() - 1 - t);
        w[t] += bias_of(s.bias, row + s.bias_column() + head * s.bias.dim, distance);
        top = std::max(top, w[t]);
    }
    for (double& x : w) total += x = std::exp(x - top);
    if (s.row_sinks) total += std::exp(sink - top);
    for (size_t t = 0; t < k.size(); ++t)
        for (int d = 0; d < s.v_dim; ++d) out[d] += w[t] / total * v[t][d];
    return out;
}

double tolerance(KvType type) {
    switch (type) {
        case KvType::kF32:
            return 1e-4;
        case KvType::kF16:
            return 1e-2;
        case KvType::kBF16:
            return 6e-2;
        case KvType::kI8:
            return 1e-1;
        default:
            return 0.6;
    }
}

// A sequence whose last token attends. kv: Rows [k | v] of the tokens before it; qkv: Its own row.
struct Decode {
    KvType type;
    LayerShape shape;
    int length, block_tokens, threads;
    std::vector<float> kv, qkv;
};

// Appends a prompt, then decodes, with exact-size heap buffers so that a read or write past an end is seen.
std::vector<float> attended(const std::string& isa, Decode& c) {
    const LayerShape& s = c.shape;
    KvCache e({s}, {c.type, c.length + 200, 3, c.block_tokens, c.threads, {}, isa});
    const int32_t slot = 2, before = c.length - 1, one = 1;
    std::vector<float> out(s.out_columns(), NAN);
    e.extend(&slot, &before, 1);
    e.append(0, &slot, &before, 1, matrix(c.kv, before, s.kv_columns()));
    e.extend(&slot, &one, 1);
    e.attend(0, &slot, &one, 1, matrix(c.qkv, 1, s.row_columns()), matrix(out, 1, s.out_columns()), nullptr, 0);
    e.check();
    return out;
}

std::vector<double> exact(const Decode& c) {
    const LayerShape& s = c.shape;
    std::vector<double> all;
    for (int h = 0; h < s.q_heads; ++h) {
        const int kv_head = h / s.group();
        std::vector<const float*> k, v;
        for (int64_t t = s.window.first(c.length); t < c.length; ++t) {
            const float* row = t < c.length - 1 ? c.kv.data() + t * s.kv_columns() : c.qkv.data() + s.q_columns();
            k.push_back(row + kv_head * s.k_dim);
            v.push_back(s.latent ? row : row + s.kv_heads * s.k_dim + kv_head * s.v_dim);
        }
        const std::vector<double> head = plain(c.qkv.data(), h, k, v, s);
        all.insert(all.end(), head.begin(), head.end());
    }
    return all;
}

// Compares every ISA with exact arithmetic, and more closely with the first one, which reads the same stored values.
void attend_case(KvType type, const LayerShape& s, int length, int block_tokens, int threads) {
    Decode c{type, s, length, block_tokens, threads, normal((length - 1) * s.kv_columns()), normal(s.row_columns())};
    if (s.bias.extent == 0)  // of slopes that are not too large for float
        for (int64_t i = s.bias_column(); i < s.sink_column(); ++i) c.qkv[i] *= 0.02f;
    const std::vector<double> expected = exact(c);
    std::vector<float> first;
    for (const std::string& isa : supported_isas()) {
        const std::vector<float> out = attended(isa, c);
        if (first.empty()) first = out;
        double error = 0, apart = 0;
        for (size_t i = 0; i < out.size(); ++i) {
            error = std::fmax(error, std::isfinite(out[i]) ? std::fabs(expected[i] - out[i]) : INFINITY);
            apart = std::fmax(apart, std::fabs(first[i] - out[i]));
        }
        CHECK(error <= tolerance(type) && apart <= 0.06,
              "%s type %d dims %d %d length %d blocks of %d: error %g, %g from %s", isa.c_str(), static_cast<int>(type),
              s.k_dim, s.v_dim, length, block_tokens, error, apart, supported_isas()[0].c_str());
    }
}

void kernels() {
    LayerShape profiles{2, 64, 64, 8, 0.125f, {}, 0, false}, all{1, 33, 50, 3, 0.2f, {70}, 0, false}, linear = profiles;
    profiles.bias = PositionBias::of(5, normal(5 * 100));
    all.bias = PositionBias::of(1, normal(2000));
    all.row_sinks = linear.row_sinks = true;
    linear.bias = PositionBias::of(2, {});
    const std::vector<LayerShape> shapes = {
        {2, 64, 64, 2, 0.125f, {}, 0, false},
        {1, 128, 128, 8, 0.09f, {}, 0, false},
        {3, 5, 7, 15, 0.4f, {}, 0, false},
        {1, 33, 130, 11, 0.2f, {70}, 0, false},
        {2, 1, 1, 4, 1.0f, {}, 20.0f, false},
        {2, 96, 80, 40, 0.1f, {90}, 0, false},
        {1, 96, 64, 32, 0.1f, {}, 0, false, true},
        {1, 80, 64, 20, 0.1f, {}, 0, false, true},
        {1, 33, 30, 35, 0.2f, {70}, 0, false, true},
        {1, 64, 64, 8, 0.1f, {70, true}, 0, false},
        profiles,
        all,
        linear,
    };
    for (int type = 0; type < kNumKvTypes; ++type)
        for (const LayerShape& s : shapes) {
            if (s.latent && type > static_cast<int>(KvType::kI8)) continue;  // refused
            for (int length : {1, 16, 65, 700})
                for (int block_tokens : {1, 16, 24, 64})
                    attend_case(static_cast<KvType>(type), s, length, block_tokens, length == 700 ? 2 : 1);
        }
}

void chunks_with_sinks() {
    const LayerShape s{2, 24, 40, 6, 0.2f, {100}, 0, true};
    KvCache e({s}, {KvType::kBF16, 4096, 4, 64, 3, {}, ""});
    const std::vector<int32_t> slots = {0, 3}, counts = {150, 1};
    std::vector<float> qkv = normal(151 * (6 * 24 + 2 * 64)), out(151 * 6 * 40, NAN), sinks = normal(6);
    for (int round = 0; round < 5; ++round) {
        e.extend(slots.data(), counts.data(), 2);
        e.attend(0, slots.data(), counts.data(), 2, matrix(qkv, 151, 6 * 24 + 2 * 64), matrix(out, 151, 6 * 40),
                 sinks.data(), 6);
    }
    int bad = 0;
    for (float x : out)
        if (!std::isfinite(x)) ++bad;
    CHECK(bad == 0, "%d values are not finite", bad);
}

void random_store_verbs(bool windowed) {
    const LayerShape s{1, 4, 4, 1, 1.0f, {}, 0, false}, last_ones{1, 4, 4, 1, 1.0f, {33}, 0, false};
    KvCacheOptions options{KvType::kF16, 3000, 40, 16, 1, {}, ""};
    options.windowed = windowed;
    KvCache e({s, last_ones}, options);
    std::set<int> open;
    for (int i = 0; i < 10000; ++i) {
        const int32_t slot = random_bits() % 40, count = random_bits() % 50;
        const int other = random_bits() % 40, verb = random_bits() % 10;
        try {
            if (verb < 5) {
                e.extend(&slot, &count, 1);
                open.insert(slot);
            } else if (verb < 7) {
                e.fork(slot, other);
                open.insert(other);
            } else if (verb < 8) {
                e.truncate(slot, count);
            } else {
                e.release(&slot, 1);
                open.erase(slot);
            }
        } catch (const std::invalid_argument&) {
        } catch (const CapacityError&) {
        }
        if (i % 50 == 0) e.check();
    }
    for (int slot : open) {
        const int32_t x = slot;
        e.release(&x, 1);
    }
    e.check();
    CHECK(e.pool().used_tokens() == 0, "%lld tokens left", static_cast<long long>(e.pool().used_tokens()));
}

// Takes a sequence through layers in chunks, of which the tokens attend that follow the prompt; returns all outputs.
std::vector<float> in_chunks(const std::vector<LayerShape>& layers, const std::vector<std::vector<float>>& rows,
                             const KvCacheOptions& options, const std::vector<int32_t>& chunks, int prompt) {
    KvCache e(layers, options);
    const int32_t slot = 1;
    std::vector<float> all;
    int at = 0;
    for (const int32_t count : chunks) {
        e.extend(&slot, &count, 1);
        for (size_t i = 0; i < layers.size(); ++i) {
            const LayerShape& s = layers[i];
            const auto row = rows[i].begin() + at * s.row_columns();
            std::vector<float> in(row, row + count * s.row_columns()), out(count * s.out_columns(), NAN), kv;
            if (at >= prompt) {
                e.attend(static_cast<int>(i), &slot, &count, 1, matrix(in, count, s.row_columns()),
                         matrix(out, count, s.out_columns()), nullptr, 0);
                all.insert(all.end(), out.begin(), out.end());
                continue;
            }
            for (int t = 0; t < count; ++t)
                kv.insert(kv.end(), row + t * s.row_columns() + s.q_columns(), row + (t + 1) * s.row_columns());
            e.append(static_cast<int>(i), &slot, &count, 1, matrix(kv, count, s.kv_columns()));
        }
        at += count;
        e.check();
    }
    return all;
}

std::vector<std::vector<float>> rows_of(const std::vector<LayerShape>& layers, int tokens) {
    std::vector<std::vector<float>> rows;
    for (const LayerShape& s : layers) rows.push_back(normal(tokens * s.row_columns()));
    return rows;
}

// What leaves windows changes no bit of what is attended to.
void windows() {
    const std::vector<LayerShape> layers = {
        {2, 16, 16, 4, 0.2f, {40}, 0, false},       {2, 16, 16, 4, 0.2f, {}, 0, false},
        {1, 24, 16, 3, 0.2f, {100}, 5.0f, false},   {2, 16, 16, 2, 0.2f, {64, true}, 0, false},
        {1, 32, 16, 3, 0.2f, {30}, 0, false, true},
    };
    const auto rows = rows_of(layers, 330);
    std::vector<int32_t> chunks = {150, 1, 99};
    chunks.resize(3 + 80, 1);
    for (const KvType type : {KvType::kF32, KvType::kBF16, KvType::kI8})
        for (const std::string& isa : supported_isas())
            for (const int block_tokens : {64, 16, 24}) {
                const KvCacheOptions whole{type, 400, 2, block_tokens, 2, {}, isa, {}, false, {}};
                KvCacheOptions dropping = whole;
                dropping.windowed = true;
                dropping.capacity_tokens = 300;  // all layers keep 330 in the end
                CHECK(in_chunks(layers, rows, whole, chunks, 250) == in_chunks(layers, rows, dropping, chunks, 250),
                      "%s type %d blocks of %d: windows", isa.c_str(), static_cast<int>(type), block_tokens);
            }
}

// What is attended to is the same however the tokens come: entries, and tokens and pools of them that are chosen.
void chosen() {
    const std::vector<LayerShape> layers = {
        {1, 32, 32, 3, 0.2f, {24}, 0, false, true, 2, 16, 5, 4},
        {1, 32, 32, 3, 0.2f, {24}, 0, false, true, 0, 0, 0, 32},
        {1, 32, 32, 3, 0.2f, {}, 0, false, true, 2, 16, 40},
        {1, 32, 32, 3, 0.2f, {}, 0, false, true, 2, 16, 40, 0, 8},
    };
    const auto rows = rows_of(layers, 200);
    std::vector<int32_t> ones(200, 1);
    for (const KvType type : {KvType::kF32, KvType::kF16, KvType::kBF16, KvType::kI8})
        for (const std::string& isa : supported_isas()) {
            const auto outputs = [&](const std::vector<int32_t>& chunks, int threads) {
                std::vector<std::vector<float>> found;
                for (size_t i = 0; i < layers.size(); ++i)
                    found.push_back(in_chunks({layers[i]}, {rows[i]}, {type, 200, 2, 32, threads, {}, isa}, chunks, 0));
                return found;
            };
            const auto all = outputs({200}, 1);
            for (const auto& layer : all)
                for (const float x : layer) CHECK(std::isfinite(x), "%s: %g of what is chosen", isa.c_str(), x);
            CHECK(all == outputs(ones, 2), "%s type %d: chosen by token", isa.c_str(), static_cast<int>(type));
            CHECK(all == outputs({3, 1, 60, 64, 1, 70, 1}, 3), "%s type %d: chosen by chunks", isa.c_str(),
                  static_cast<int>(type));
        }
}

void rejected() {
    const LayerShape s{1, 4, 4, 1, 1.0f, {}, 0, false};
    KvCache e({s}, {KvType::kF32, 64, 2, 16, 1, {}, ""});
    std::vector<float> data(64);
    const int32_t bad[] = {-1, 2}, count = 1;
    for (const int32_t& slot : bad) {
        try {
            e.attend(0, &slot, &count, 1, matrix(data, 1, 12), matrix(data, 1, 4), nullptr, 0);
            CHECK(false, "slot %d was accepted", slot);
        } catch (const std::invalid_argument&) {
        }
    }
    try {
        select_isa("nonsense");
        CHECK(false, "an unknown ISA was accepted");
    } catch (const std::invalid_argument&) {
    }
}

}  // namespace

int main() {
    kernels();
    chunks_with_sinks();
    for (const bool windowed : {false, true}) random_store_verbs(windowed);
    windows();
    chosen();
    rejected();
    for (const std::string& isa : supported_isas())
        CHECK(ReadProbe(8 << 20, 2, {}, isa, {}).seconds() > 0, "no time passed");
    return report("kv_cache");
}
