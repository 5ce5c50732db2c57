#include "arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Arena::Arena(size_t bytes) : size_(bytes), mapped_(bytes + kHugePage) {
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map_ == MAP_FAILED) {
        throw std::runtime_error("cannot map " + std::to_string(bytes >> 20) +
                                 " MiB for the KV cache: " + std::strerror(errno) + "; lower the KV capacity");
    }
    const uintptr_t start = (reinterpret_cast<uintptr_t>(map_) + kHugePage - 1) / kHugePage * kHugePage;
    data_ = reinterpret_cast<uint8_t*>(start);
    madvise(data_, size_, MADV_HUGEPAGE);  // a refusal costs speed only
}

Arena::~Arena() { munmap(map_, mapped_); }

}  // namespace hpcdecode
