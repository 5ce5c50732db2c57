#include <cuda_runtime_api.h>

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "device.h"

namespace hpcdecode {
namespace {

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw std::bad_alloc();
    }
    throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

// Returns a version as the runtime gives it, 12040, as text: 12.4.
std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

Using::Using(int index) {
    int current = 0;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (index == current) return;
    check(cudaSetDevice(index), "cudaSetDevice");
    before_ = current;
}
Using::~Using() {
    if (before_ != kUnchanged) cudaSetDevice(before_);  // which makes a context there if there is none
}

Memory::Memory(size_t bytes, Kind kind) : size_(bytes), kind_(kind) {
    if (bytes == 0) return;
    check(kind == Kind::kPinned ? cudaMallocHost(&data_, bytes) : cudaMalloc(&data_, bytes), "memory");
}
Memory::~Memory() {
    if (data_ != nullptr) kind_ == Kind::kPinned ? cudaFreeHost(data_) : cudaFree(data_);
}

Event::~Event() {
    if (event_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}
Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

void Event::record(Stream stream) {
    cudaEvent_t event = static_cast<cudaEvent_t>(event_);
    if (event == nullptr) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    event_ = event;
    check(cudaEventRecord(event, of(stream)), "cudaEventRecord");
}

void Event::reach() const {
    if (event_ != nullptr) check(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)), "cudaEventSynchronize");
}

void Event::before(Stream stream) const {
    if (event_ == nullptr) return;
    check(cudaStreamWaitEvent(of(stream), static_cast<cudaEvent_t>(event_), 0), "cudaStreamWaitEvent");
}

void copy_in(void* to, const void* from, size_t bytes, Stream stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, of(stream)), "cudaMemcpyAsync");
}

int device_count() {
    int count = 0, driver = 0, runtime = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess) return count;
    cudaGetLastError();
    if (error == cudaErrorNoDevice) return 0;
    const bool known = cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess;
    if (known && driver == 0) return 0;  // no driver
    const std::string versions =
        "the driver runs CUDA " + version(driver) + ", this was built with " + version(runtime);
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error) + (known ? " (" + versions + ")" : ""));
}

size_t shared_bytes() {
    int device = 0, bytes = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    return static_cast<size_t>(bytes);
}

}  // namespace hpcdecode
