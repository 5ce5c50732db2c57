// What a KV cache asks of the CUDA runtime in steady decoding, noted by one that has no GPU: the device that is
// current, nothing allocated or freed, no wait but for events long past, and one copy a step. Kernels are emulated.
#include <vector>

#include "check.h"
#include "kv_cache.h"
#include "noted.h"
#include "random_rows.h"

using namespace hpcdecode;

namespace {

constexpr int kCurrent = 0, kDevice = 1;  // devices: of the caller, and of the KV cache
constexpr int kLayers = 3, kSequences = 4, kSteps = 40;
constexpr int kWarmUp = KvCacheOptions{}.batches + 2;  // steps until every batch on the device has its memory
constexpr int kOld = 3;  // steps after which an event has passed on a device that keeps up with its host

// Sequences that decode, all layers a step.
class Decoding {
  public:
    explicit Decoding(int length) : cache_(shapes(), options()) {
        for (int i = 0; i < kSequences; ++i) slots_.push_back(i);
        const std::vector<int32_t> counts(kSequences, length);
        const LayerShape s = shapes()[0];
        std::vector<float> prompt = normal(size_t(kSequences) * length * s.kv_columns());
        cache_.extend(slots_.data(), counts.data(), kSequences, stream());
        for (int layer = 0; layer < kLayers; ++layer)
            cache_.append(layer, slots_.data(), counts.data(), kSequences,
                          matrix(prompt, int64_t{kSequences} * length, s.kv_columns()), stream());
        rows_ = normal(size_t(kSequences) * s.row_columns());
        out_.resize(size_t(kSequences) * s.out_columns());
    }

    void one_step() {
        const LayerShape s = shapes()[0];
        const std::vector<int32_t> ones(kSequences, 1);
        cache_.extend(slots_.data(), ones.data(), kSequences, stream());
        CHECK(noted.current == kCurrent, "%d", noted.current);
        for (int layer = 0; layer < kLayers; ++layer) {
            cache_.attend(layer, slots_.data(), ones.data(), kSequences, matrix(rows_, kSequences, s.row_columns()),
                          matrix(out_, kSequences, s.out_columns()), nullptr, stream());
            CHECK(noted.current == kCurrent, "%d", noted.current);
        }
        ++noted.step;
    }

  private:
    static std::vector<LayerShape> shapes() {
        LayerShape s{};
        s.kv_heads = 1, s.k_dim = 16, s.v_dim = 16, s.q_heads = 2, s.scale = 0.25f;
        return std::vector<LayerShape>(kLayers, s);
    }
    static KvCacheOptions options() {
        KvCacheOptions o{};
        o.kv_type = KvType::kBF16, o.capacity_tokens = 1 << 13, o.max_sequences = kSequences, o.block_tokens = 16;
        o.device = kDevice;
        return o;
    }
    static Stream stream() { return reinterpret_cast<Stream>(0x10); }

    KvCache cache_;
    std::vector<int32_t> slots_;
    std::vector<float> rows_, out_;
};

// length: Of the prompts; with 500 tokens steps come to a second piece of 512.
void test_steady_steps(int length) {
    noted = {};
    Decoding decoding(length);
    CHECK(noted.current == kCurrent, "%d", noted.current);
    CHECK(noted.count("cudaMalloc") > 0, "a KV cache without memory");
    for (int i = 0; i < kWarmUp; ++i) decoding.one_step();
    noted.calls.clear();
    for (int i = 0; i < kSteps; ++i) decoding.one_step();
    for (const char* name : {"cudaMalloc", "cudaMallocHost", "cudaFree", "cudaFreeHost", "cudaEventCreate"})
        CHECK(noted.count(name) == 0, "%d of %s in %d steps from %d tokens", noted.count(name), name, kSteps, length);
    CHECK(noted.count("cudaMemcpyAsync") <= kSteps, "%d copies in %d steps", noted.count("cudaMemcpyAsync"), kSteps);
    CHECK(noted.count("cudaStreamWaitEvent") == 0, "%d waits of one stream for itself",
          noted.count("cudaStreamWaitEvent"));
    for (const NotedCall& call : noted.calls) {
        CHECK(call.device == kDevice, "%s on device %d", call.name.c_str(), call.device);
        CHECK(call.name != "cudaEventSynchronize" || call.age >= kOld, "waits for an event of %d steps ago", call.age);
    }
}

}  // namespace

int main() {
    test_steady_steps(100);
    test_steady_steps(500);
    return report("steady_calls_test");
}
