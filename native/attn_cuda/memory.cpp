#include <utility>

#include "device.h"

namespace hpcdecode {

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), kind_(other.kind_) {}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(kind_, other.kind_);
    return *this;
}

void Memory::grow(size_t bytes, Kind kind) {
    if (bytes <= size_) return;
    *this = Memory();
    *this = Memory(bytes + bytes / 4, kind);
}

}  // namespace hpcdecode
