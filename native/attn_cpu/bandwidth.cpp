#include "bandwidth.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "isa.h"

namespace hpcdecode {
namespace {

constexpr size_t kShare = size_t{1} << 20;

struct Pass {
    const KernelTable* table;
    uint8_t* data;
    size_t shares;
    bool write;
    std::atomic<size_t> next;
    std::atomic<int> odd;  // keeps the reads from being dropped
};

void take(void* context, int) {
    Pass& p = *static_cast<Pass*>(context);
    for (size_t i; (i = p.next.fetch_add(1)) < p.shares;) {
        if (p.write) {
            std::memset(p.data + i * kShare, 1, kShare);
        } else if (p.table->read(p.data + i * kShare, kShare) > 1.0) {
            p.odd.fetch_add(1);
        }
    }
}

}  // namespace

ReadProbe::ReadProbe(size_t bytes, int threads, const std::vector<int>& cpus, const std::string& isa)
    : table_(select_isa(isa)), arena_((bytes + kShare - 1) / kShare * kShare), pool_(threads, cpus) {
    if (bytes < kShare) throw std::invalid_argument("bytes: expected at least 1 MiB, got " + std::to_string(bytes));
    Pass touch{&table_, arena_.data(), arena_.size() / kShare, true, {0}, {0}};
    pool_.run(take, &touch);
}

double ReadProbe::seconds() {
    Pass pass{&table_, arena_.data(), arena_.size() / kShare, false, {0}, {0}};
    const auto start = std::chrono::steady_clock::now();
    pool_.run(take, &pass);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hpcdecode
