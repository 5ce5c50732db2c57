#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "isa.h"

namespace hpcdecode {
namespace {

constexpr size_t kShare = size_t{1} << 20;

struct Pass {
    const KernelTable* table;  // null: write
    const NumaNodes* nodes;
    NodeQueues* queues;
    uint8_t* data;
    size_t bytes;
    std::atomic<int> odd;  // keeps the reads from being dropped
};

void take(void* context, int thread) {
    Pass& p = *static_cast<Pass*>(context);
    const int node = p.nodes->of_thread(thread);
    for (int64_t i; (i = p.queues->take(node)) >= 0;) {
        uint8_t* share = p.data + i * kShare;
        const size_t bytes = std::min(kShare, p.bytes - i * kShare);
        if (p.table == nullptr) {
            std::memset(share, 1, bytes);
        } else if (p.table->read(share, bytes) > 1.0) {
            p.odd.fetch_add(1);
        }
    }
}

std::vector<int64_t> shares_of(const NumaNodes& nodes, size_t bytes) {
    return nodes.cut((bytes + kShare - 1) / kShare);
}

}  // namespace

double read_seconds(const KernelTable& table, Workers& workers, const NumaNodes& nodes, NodeQueues& queues,
                    const uint8_t* data, size_t bytes) {
    const auto start = std::chrono::steady_clock::now();
    Pass p{&table, &nodes, &queues, const_cast<uint8_t*>(data), bytes, {0}};
    queues.fill(shares_of(nodes, bytes));
    workers.run(take, &p);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

ReadProbe::ReadProbe(size_t bytes, int threads, const std::vector<int>& cpus, const std::string& isa,
                     const std::vector<int>& nodes)
    : table_(select_isa(isa)),
      pool_(threads, cpus),
      nodes_(threads, cpus, nodes),
      queues_(nodes_.count()),
      arena_((bytes + kShare - 1) / kShare * kShare) {
    if (bytes < kShare) throw std::invalid_argument("bytes: expected at least 1 MiB, got " + std::to_string(bytes));
    const std::vector<int64_t> bounds = shares_of(nodes_, arena_.size());
    for (int i = 0; i < nodes_.count(); ++i)
        arena_.bind(bounds[i] * kShare, (bounds[i + 1] - bounds[i]) * kShare, nodes_.number(i));
    Pass p{nullptr, &nodes_, &queues_, arena_.data(), arena_.size(), {0}};
    queues_.fill(bounds);
    pool_.run(take, &p);
}

}  // namespace hpcdecode
