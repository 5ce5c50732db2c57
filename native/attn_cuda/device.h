// The memory, streams and events of a device. device_cuda.cpp implements them by the CUDA runtime. device_emulated.cpp
// implements them by this machine's memory, where a stream does its work at once.
//
// All throw std::runtime_error if the device refuses, and std::bad_alloc if its memory is full.
#pragma once
#include <cstddef>

namespace hpcdecode {

using Stream = void*;  // cudaStream_t; null: the default stream

constexpr int kDeviceType = HPCDECODE_DEVICE_TYPE;  // DLPack's device type of the tensors that the KV cache takes

// The calling thread works on device `index` while this lives.
class Using {
  public:
    explicit Using(int index);
    ~Using();
    Using(const Using&) = delete;
    Using& operator=(const Using&) = delete;

  private:
    static constexpr int kUnchanged = -1;
    int before_ = kUnchanged;  // to go back to
};

// Device memory, or pinned host memory.
class Memory {
  public:
    enum class Kind { kDevice, kPinned };
    Memory() = default;
    Memory(size_t bytes, Kind kind);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    void grow(size_t bytes, Kind kind);  // allocates new memory if this is too small, without copying
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t size() const { return size_; }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
    Kind kind_ = Kind::kDevice;
};

// A place in a stream. Before the first `record` there is nothing to wait for.
class Event {
  public:
    Event() = default;
    ~Event();
    Event(Event&& other) noexcept;
    Event& operator=(Event&&) = delete;
    void record(Stream stream);
    void reach() const;                // the host waits until the stream has come there
    void before(Stream stream) const;  // `stream` waits
  private:
    void* event_ = nullptr;
};

void copy_in(void* to, const void* from, size_t bytes, Stream stream);  // from pinned memory to the device
// Returns the number of devices, 0 without a driver.
int device_count();
size_t shared_bytes();  // most shared memory of a block on the device in use

}  // namespace hpcdecode
