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
    const NumaNodes* nodes;
    NodeQueues* queues;
    uint8_t* data;
    bool write;
    std::atomic<int> odd;  // keeps the reads from being dropped
};

void take(void* context, int thread) {
    Pass& p = *static_cast<Pass*>(context);
    const int node = p.nodes->of_thread(thread);
    for (int64_t i; (i = p.queues->take(node)) >= 0;) {
        if (p.write) {
            std::memset(p.data + i * kShare, 1, kShare);
        } else if (p.table->read(p.data + i * kShare, kShare) > 1.0) {
            p.odd.fetch_add(1);
        }
    }
}

}  // namespace

ReadProbe::ReadProbe(size_t bytes, int threads, const std::vector<int>& cpus, const std::string& isa,
                     const std::vector<int>& nodes)
    : table_(select_isa(isa)),
      pool_(threads, cpus),
      nodes_(threads, cpus, nodes),
      queues_(nodes_.count()),
      arena_((bytes + kShare - 1) / kShare * kShare),
      bounds_(nodes_.cut(arena_.size() / kShare)) {
    if (bytes < kShare) throw std::invalid_argument("bytes: expected at least 1 MiB, got " + std::to_string(bytes));
    for (int i = 0; i < nodes_.count(); ++i)
        arena_.bind(bounds_[i] * kShare, (bounds_[i + 1] - bounds_[i]) * kShare, nodes_.number(i));
    pass(true);
}

void ReadProbe::pass(bool write) {
    Pass p{&table_, &nodes_, &queues_, arena_.data(), write, {0}};
    queues_.fill(bounds_);
    pool_.run(take, &p);
}

double ReadProbe::seconds() {
    const auto start = std::chrono::steady_clock::now();
    pass(false);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hpcdecode
