// Exercises the KV cache of a device and its kernels, emulated, for a sanitizer to watch: memory errors where a block's
// threads are loops, races between barriers where they are the system's.
#include <algorithm>
#include <cmath>
#include <vector>

#include "block.h"
#include "check.h"
#include "device_states.h"
#include "kv_cache.h"
#include "random_rows.h"
#include "weights_api.h"

using namespace hpcdecode;

namespace {

#ifdef HPCDECODE_BLOCK_THREADS
const std::vector<int> kLengths = {140};                                      // three tiles
const std::vector<KvType> kTypes = {KvType::kF32, KvType::kI8, KvType::kI4};  // those whose phases differ
const std::vector<KvType> kLatentTypes = {KvType::kF32, KvType::kBF16};
const std::vector<ActType> kActs = {ActType::kBF16};  // phases are the same for both
#else
const std::vector<int> kLengths = {1, 64, 65, 700};
const std::vector<KvType> kTypes = {KvType::kF32, KvType::kF16, KvType::kBF16, KvType::kI8, KvType::kK8V4, KvType::kI4};
const std::vector<KvType> kLatentTypes = {KvType::kF32, KvType::kF16, KvType::kBF16};
const std::vector<ActType> kActs = {ActType::kF32, ActType::kBF16};
#endif

// A matrix of a call, in memory of its exact size.
struct Rows {
    ActType type;
    int64_t rows, columns;
    std::vector<float> wide;
    std::vector<uint16_t> narrow;

    Rows(ActType type, const std::vector<float>& values, int64_t rows)
        : type(type), rows(rows), columns(rows > 0 ? static_cast<int64_t>(values.size()) / rows : 0) {
        if (type == ActType::kF32) wide = values;
        for (size_t i = 0; type == ActType::kBF16 && i < values.size(); ++i) narrow.push_back(bf16_of(values[i]));
    }
    Matrix matrix() {
        void* data = type == ActType::kF32 ? static_cast<void*>(wide.data()) : narrow.data();
        return {data, type, rows, columns, columns};
    }
    float at(int64_t i) const { return type == ActType::kF32 ? wide[i] : float_of_bf16(narrow[i]); }
};

// One output of decode attention, in double.
double plain(const LayerShape& s, const std::vector<float>& kv, const std::vector<float>& row, int head, int dim) {
    const int64_t columns = s.kv_columns(), length = static_cast<int64_t>(kv.size()) / columns;
    const int kv_head = head / s.group();
    const int64_t v = s.latent ? 0 : int64_t{s.kv_heads} * s.k_dim + kv_head * s.v_dim;
    double sum = 0, total = 0;
    for (int64_t t = s.window.first(length); t < length; ++t) {
        double score = 0;
        for (int d = 0; d < s.k_dim; ++d)
            score += double{row[head * s.k_dim + d]} * kv[t * columns + kv_head * s.k_dim + d];
        score *= s.scale;
        if (s.softcap > 0) score = s.softcap * std::tanh(score / s.softcap);
        total += std::exp(score);
        sum += std::exp(score) * kv[t * columns + v + dim];
    }
    return sum / total;
}

// Returns how far off outputs of normal numbers may be: those of one token are off by what V is.
double bound_of(KvType type) {
    switch (type) {
        case KvType::kF32:
            return 1e-4;
        case KvType::kI8:
            return 0.1;
        case KvType::kK8V4:
        case KvType::kI4:
            return 0.8;
        default:
            return 0.06;
    }
}

// Appends a prompt, forks it, then decodes in both, with buffers of the exact size.
void attend_case(KvType type, ActType act, const LayerShape& s, int length, int block_tokens) {
    KvCacheOptions options{type, 2 * (length + 100), 2, block_tokens, 0};
    options.windowed = length > 65;
    KvCache e({s, s}, options);
    const int32_t slots[] = {1, 0}, before = length - 1, ones[] = {1, 1};
    std::vector<float> kv = normal(before * s.kv_columns()), row = normal(s.q_columns() + s.kv_columns()), rows = row;
    rows.insert(rows.end(), row.begin(), row.end());
    Rows prompt(act, kv, before), last(act, rows, 2);
    Rows out(act, std::vector<float>(2 * s.out_columns(), NAN), 2);
    e.extend(slots, &before, 1, nullptr);
    Matrix given = prompt.matrix();
    given.columns = given.stride = s.kv_columns();
    e.append(1, slots, &before, 1, given, nullptr);
    e.fork(1, 0);
    e.extend(slots, ones, 2, nullptr);
    e.attend(1, slots, ones, 2, last.matrix(), out.matrix(), nullptr, nullptr);
    e.check();
    kv.insert(kv.end(), row.begin() + s.q_columns(), row.end());
    for (int head = 0; head < s.q_heads; ++head) {
        for (int d = 0; d < s.v_dim; ++d) {
            const int64_t i = head * s.v_dim + d;
            const double want = plain(s, kv, row, head, d), got = out.at(i);
            const double bound = std::max(bound_of(type), act == ActType::kF32 ? 0 : 0.06);
            if (std::fabs(want - got) <= bound && got == out.at(s.out_columns() + i)) continue;
            CHECK(false, "types %d %d dims %d %d length %d blocks of %d: %g, expected %g", static_cast<int>(type),
                  static_cast<int>(act), s.k_dim, s.v_dim, length, block_tokens, got, want);
            return;
        }
    }
}

// Weights of random bits, in memory of their exact size.
void expand_case(ops::WeightForm form, ActType type, int experts, int outputs, int64_t inputs) {
    ExpandArgs a = expand_args(form, type, outputs, inputs);
    std::vector<uint8_t> packed(static_cast<size_t>(experts) * a.panels * a.panel_bytes);
    for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<uint8_t>(i * 37 % 251 & 0x3f);
    std::vector<uint32_t> out(experts * outputs * inputs / (type == ActType::kF32 ? 1 : 2), 0xffffffffu);
    a.packed = packed.data();
    a.out = out.data();
    launch_expand(a, form, experts, nullptr);
    CHECK(std::count(out.begin(), out.end(), 0xffffffffu) == 0, "form %d: a number was not written",
          static_cast<int>(form));
}

}  // namespace

int main() {
    const std::vector<LayerShape> shapes = {
        {1, 64, 64, 4, 0.125f, {}, 0, false},
        {1, 33, 130, 3, 0.2f, {170}, 20.0f, false},
#ifndef HPCDECODE_BLOCK_THREADS  // phases are the same
        {1, 64, 64, 2, 0.2f, {170, true}, 0, false},
#endif
    };
    for (KvType type : kTypes)
        for (const LayerShape& s : shapes)
            for (ActType act : kActs)
                for (int length : kLengths) attend_case(type, act, s, length, length % 2 ? 24 : 64);
    const std::vector<LayerShape> latents = {
        {1, 48, 32, 5, 0.2f, {170}, 20.0f, false, true},
        {1, 40, 30, 40, 0.2f, {}, 0, false, true},  // more heads than share a read, or one by 64
    };
    for (KvType type : kLatentTypes)
        for (const LayerShape& s : latents)
            for (ActType act : {ActType::kF32, ActType::kBF16})
                for (int length : kLengths) attend_case(type, act, s, length, length % 2 ? 24 : 64);
    for (int form = static_cast<int>(ops::WeightForm::int4); form <= static_cast<int>(ops::WeightForm::q6_k); ++form)
        for (ActType act : kActs)
            for (int outputs : {16, 33, 70}) expand_case(static_cast<ops::WeightForm>(form), act, 2, outputs, 1280);
    check_states();
    return report("device");
}
