// What device_cuda.cpp asks of the CUDA runtime, noted by one that has no GPU: devices that it sets, errors that it
// tells or leaves untold.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "device.h"

using namespace hpcdecode;

namespace {

int current = 0;
std::vector<int> set;                 // devices that were set, in order
cudaError_t of_count = cudaSuccess;   // of cudaGetDeviceCount
cudaError_t of_memory = cudaSuccess;  // of allocations
int driver_version = 0;               // 0: none
int errors_left = 0, events = 0, blocks = 0;

// Returns what device_count throws, or the number that it returns.
std::string counted() {
    try {
        return std::to_string(device_count());
    } catch (const std::runtime_error& error) {
        return error.what();
    }
}

void test_a_device_in_use_is_not_set() {
    current = 1;
    set.clear();
    {
        const Using device(1);
    }
    CHECK(set.empty(), "%zu calls", set.size());
}

void test_another_device_is_set_and_set_back() {
    current = 2;
    set.clear();
    {
        const Using device(1);
        CHECK(current == 1, "%d", current);
    }
    CHECK((set == std::vector<int>{1, 2}), "%zu calls", set.size());
}

void test_a_driver_that_fails_is_told() {
    of_count = cudaSuccess;
    CHECK(counted() == "3", "%s", counted().c_str());
    of_count = cudaErrorNoDevice, driver_version = 12020;
    CHECK(counted() == "0", "%s", counted().c_str());
    of_count = cudaErrorInsufficientDriver, driver_version = 0;  // no driver
    CHECK(counted() == "0", "%s", counted().c_str());
    driver_version = 12020;
    CHECK(counted() == "CUDA: insufficient driver (the driver runs CUDA 12.2, this was built with 13.0)", "%s",
          counted().c_str());
    CHECK(errors_left == 0, "%d", errors_left);
    of_count = cudaSuccess;
}

void test_full_memory_is_bad_alloc_and_leaves_no_error() {
    of_memory = cudaErrorMemoryAllocation;
    bool thrown = false;
    try {
        const Memory memory(1 << 20, Memory::Kind::kDevice);
    } catch (const std::bad_alloc&) {
        thrown = true;
    }
    CHECK(thrown && errors_left == 0, "%d", errors_left);
    of_memory = cudaSuccess;
}

void test_memory_and_events_are_given_back() {
    {
        Memory memory(100, Memory::Kind::kPinned);
        memory.grow(1000, Memory::Kind::kPinned);
        Event event;
        event.reach();
        event.record(nullptr);
        event.record(nullptr);
        CHECK(events == 1 && blocks == 1, "%d events, %d blocks", events, blocks);
    }
    CHECK(events == 0 && blocks == 0, "%d events, %d blocks", events, blocks);
}

cudaError_t told(cudaError_t error) {
    errors_left = error != cudaSuccess;
    return error;
}

cudaError_t taken(void** data, size_t bytes) {
    if (of_memory != cudaSuccess) return told(of_memory);
    ++blocks;
    *data = std::malloc(bytes);
    return cudaSuccess;
}

cudaError_t freed(void* data) {
    --blocks;
    std::free(data);
    return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetLastError() {
    errors_left = 0;
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInsufficientDriver ? "insufficient driver" : "other";
}
cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    set.push_back(device);
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 3;
    return told(of_count);
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver_version;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 1 << 16;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) { return taken(data, bytes); }
cudaError_t cudaMallocHost(void** data, size_t bytes) { return taken(data, bytes); }
cudaError_t cudaFree(void* data) { return freed(data); }
cudaError_t cudaFreeHost(void* data) { return freed(data); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    *event = reinterpret_cast<cudaEvent_t>(&events);
    ++events;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    --events;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }

int main() {
    test_a_device_in_use_is_not_set();
    test_another_device_is_set_and_set_back();
    test_a_driver_that_fails_is_told();
    test_full_memory_is_bad_alloc_and_leaves_no_error();
    test_memory_and_events_are_given_back();
    return report("cuda_calls_test");
}
