#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "arena.h"
#include "isa.h"
#include "thread_pool.h"

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

double read_bandwidth(size_t bytes, int threads, const std::vector<int>& cpus, int passes, const std::string& isa) {
    if (bytes < kShare || passes < 1) throw std::invalid_argument("read_bandwidth: expected at least 1 MiB and 1 pass");
    const size_t shares = bytes / kShare;
    Arena arena(shares * kShare);
    ThreadPool pool(threads, cpus);
    Pass pass{&select_isa(isa), arena.data(), shares, true, {0}, {0}};
    pool.run(take, &pass);
    pass.write = false;
    std::vector<double> rates;
    for (int i = 0; i < passes; ++i) {
        pass.next = 0;
        const auto start = std::chrono::steady_clock::now();
        pool.run(take, &pass);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        rates.push_back(static_cast<double>(shares * kShare) / seconds * 1e-9);
    }
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
}

}  // namespace hpcdecode
