#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "device.h"

namespace hpcdecode {

Using::Using(int) {}
Using::~Using() {}

Memory::Memory(size_t bytes, Kind kind)
    : data_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), size_(bytes), kind_(kind) {
    if (data_ == nullptr && bytes > 0) throw std::bad_alloc();
}
Memory::~Memory() { std::free(data_); }

Event::~Event() {}
Event::Event(Event&&) noexcept {}
void Event::record(Stream) {}
void Event::reach() const {}
void Event::before(Stream) const {}

void copy_in(void* to, const void* from, size_t bytes, Stream) { std::memcpy(to, from, bytes); }
int device_count() { return 1; }
size_t shared_bytes() { return 227 << 10; }

}  // namespace hpcdecode
