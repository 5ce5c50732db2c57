#include "noted.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

NotedRuntime noted;

int NotedRuntime::count(const std::string& name) const {
    return static_cast<int>(
        std::count_if(calls.begin(), calls.end(), [&](const NotedCall& c) { return c.name == name; }));
}

namespace {

cudaError_t note(const char* name, int age = 0) {
    noted.calls.push_back({name, noted.current, age});
    return cudaSuccess;
}

cudaError_t told(cudaError_t error) {
    noted.errors_left = error != cudaSuccess;
    return error;
}

cudaError_t taken(const char* name, void** data, size_t bytes) {
    if (noted.of_memory != cudaSuccess) return told(noted.of_memory);
    ++noted.blocks;
    *data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return note(name);
}

cudaError_t freed(const char* name, void* data) {
    --noted.blocks;
    std::free(data);
    return note(name);
}

}  // namespace

cudaError_t cudaGetLastError() {
    noted.errors_left = 0;
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInsufficientDriver ? "insufficient driver" : "other";
}
cudaError_t cudaGetDevice(int* device) {
    *device = noted.current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    noted.current = device;
    noted.devices_set.push_back(device);
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 3;
    return told(noted.of_count);
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = noted.driver_version;
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
    std::memcpy(to, from, bytes);
    return note("cudaMemcpyAsync");
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    static intptr_t made = 0;
    *event = reinterpret_cast<cudaEvent_t>(++made);
    ++noted.events;
    return note("cudaEventCreate");
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    --noted.events;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    noted.recorded[event] = noted.step;
    return note("cudaEventRecord");
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return note("cudaEventSynchronize", noted.step - noted.recorded[event]);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return note("cudaStreamWaitEvent"); }
