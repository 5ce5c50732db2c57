#include "arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace hpcdecode {
namespace {
constexpr size_t kPage = 4096;
constexpr int kPreferred = 1;       // MPOL_PREFERRED of linux/mempolicy.h: no kill where the node is full
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of linux/mman.h, from Linux 5.14 on
}  // namespace

Arena::Arena(size_t bytes, const char* purpose) : size_(bytes), mapped_(bytes + kHugePage) {
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map_ == MAP_FAILED) {
        throw std::runtime_error("cannot map " + std::to_string(bytes >> 20) + " MiB for " + purpose + ": " +
                                 std::strerror(errno) + "; lower the KV capacity");
    }
    const uintptr_t start = (reinterpret_cast<uintptr_t>(map_) + kHugePage - 1) / kHugePage * kHugePage;
    data_ = reinterpret_cast<uint8_t*>(start);
    madvise(data_, size_, MADV_HUGEPAGE);  // a refusal costs speed only
}

void Arena::bind(size_t offset, size_t bytes, int node) {
    const size_t begin = (offset + kPage - 1) / kPage * kPage, end = (offset + bytes + kPage - 1) / kPage * kPage;
    if (node < 0 || begin >= end) return;
    constexpr size_t kBits = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask(node / kBits + 1, 0);
    mask.back() = 1ul << node % kBits;
    syscall(SYS_mbind, data_ + begin, end - begin, kPreferred, mask.data(), mask.size() * kBits + 1, 0);
}

void Arena::populate(size_t huge_page) {
    const size_t begin = huge_page * kHugePage;
    populate(begin, std::min(kHugePage, size_ - begin));
}

void Arena::populate(size_t offset, size_t bytes) {
    madvise(data_ + offset, bytes, kPopulateWrite);  // a refusal costs speed only
}

void Arena::discard(size_t offset, size_t bytes) {
    if (madvise(data_ + offset, bytes, MADV_DONTNEED) != 0) std::memset(data_ + offset, 0, bytes);
}

Arena::~Arena() { munmap(map_, mapped_); }

}  // namespace hpcdecode
