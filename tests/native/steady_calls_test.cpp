// What a KV cache asks of the CUDA runtime in steady decoding, noted by one that has no GPU: the device that is
// current, nothing allocated or freed, no wait but for events long past, and one copy a step. Kernels are emulated.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "kv_cache.h"
#include "random_rows.h"

using namespace hpcdecode;

namespace {

constexpr int kCurrent = 0, kDevice = 1;  // devices: of the caller, and of the KV cache
constexpr int kLayers = 3, kSequences = 4, kSteps = 40;
constexpr int kWarmUp = KvCacheOptions{}.batches + 2;  // steps until every batch on the device has its memory
constexpr int kOld = 3;  // steps after which an event has passed on a device that keeps up with its host

struct Noted {
    std::string name;
    int device;
    int age;  // of an event that is waited for: steps since it was recorded
};

int current = kCurrent, step = 0, events = 0;
std::vector<Noted> calls;
std::map<cudaEvent_t, int> recorded;  // step

void note(const char* name, int age = 0) { calls.push_back({name, current, age}); }

int count(const std::vector<std::string>& names) {
    return std::count_if(calls.begin(), calls.end(), [&](const Noted& call) {
        return std::find(names.begin(), names.end(), call.name) != names.end();
    });
}

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
        CHECK(current == kCurrent, "%d", current);
        for (int layer = 0; layer < kLayers; ++layer) {
            cache_.attend(layer, slots_.data(), ones.data(), kSequences, matrix(rows_, kSequences, s.row_columns()),
                          matrix(out_, kSequences, s.out_columns()), nullptr, stream());
            CHECK(current == kCurrent, "%d", current);
        }
        ++step;
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
    calls.clear(), recorded.clear(), step = 0;
    Decoding decoding(length);
    CHECK(current == kCurrent, "%d", current);
    CHECK(count({"cudaMalloc"}) > 0, "a KV cache without memory");
    for (int i = 0; i < kWarmUp; ++i) decoding.one_step();
    calls.clear();
    for (int i = 0; i < kSteps; ++i) decoding.one_step();
    for (const char* name : {"cudaMalloc", "cudaMallocHost", "cudaFree", "cudaFreeHost", "cudaEventCreate"})
        CHECK(count({name}) == 0, "%d of %s in %d steps from %d tokens", count({name}), name, kSteps, length);
    CHECK(count({"cudaMemcpyAsync"}) <= kSteps, "%d copies in %d steps", count({"cudaMemcpyAsync"}), kSteps);
    CHECK(count({"cudaStreamWaitEvent"}) == 0, "%d waits of one stream for itself", count({"cudaStreamWaitEvent"}));
    for (const Noted& call : calls) {
        CHECK(call.device == kDevice, "%s on device %d", call.name.c_str(), call.device);
        CHECK(call.name != "cudaEventSynchronize" || call.age >= kOld, "waits for an event of %d steps ago", call.age);
    }
}

cudaError_t taken(const char* name, void** data, size_t bytes) {
    note(name);
    *data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return cudaSuccess;
}

cudaError_t freed(const char* name, void* data) {
    note(name);
    std::free(data);
    return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 2;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 227 << 10;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) { return taken("cudaMalloc", data, bytes); }
cudaError_t cudaMallocHost(void** data, size_t bytes) { return taken("cudaMallocHost", data, bytes); }
cudaError_t cudaFree(void* data) { return freed("cudaFree", data); }
cudaError_t cudaFreeHost(void* data) { return freed("cudaFreeHost", data); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    note("cudaMemcpyAsync");
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    note("cudaEventCreate");
    *event = reinterpret_cast<cudaEvent_t>(static_cast<intptr_t>(++events));
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    note("cudaEventRecord");
    recorded[event] = step;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    note("cudaEventSynchronize", step - recorded[event]);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) {
    note("cudaStreamWaitEvent");
    return cudaSuccess;
}

int main() {
    test_steady_steps(100);
    test_steady_steps(500);
    return report("steady_calls_test");
}
