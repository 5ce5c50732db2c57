#include "numa.h"

#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hpcdecode {

NumaNodes::NumaNodes(int threads, const std::vector<int>& cpus, const std::vector<int>& nodes)
    : numbers_(nodes), of_thread_(std::max(threads, 1), 0) {
    if (nodes.empty()) {
        numbers_ = {-1};
        return;
    }
    if (nodes.size() != cpus.size() || nodes.size() != of_thread_.size()) {
        throw std::invalid_argument("nodes: expected one NUMA node per thread and CPU (" +
                                    std::to_string(of_thread_.size()) + "), got " + std::to_string(nodes.size()));
    }
    std::sort(numbers_.begin(), numbers_.end());
    numbers_.erase(std::unique(numbers_.begin(), numbers_.end()), numbers_.end());
    if (numbers_.front() < 0) throw std::invalid_argument("nodes: expected numbers from 0 on, got a negative one");
    of_cpu_.assign(std::max(*std::max_element(cpus.begin(), cpus.end()), 0) + 1, -1);
    for (size_t i = 0; i < nodes.size(); ++i) {
        const auto found = std::lower_bound(numbers_.begin(), numbers_.end(), nodes[i]);
        of_thread_[i] = static_cast<int>(found - numbers_.begin());
        if (cpus[i] >= 0) of_cpu_[cpus[i]] = of_thread_[i];
    }
}

int NumaNodes::of_thread(int thread) const {
    if (thread > 0 || count() == 1) return of_thread_[thread];
    const int cpu = sched_getcpu();
    const bool known = cpu >= 0 && cpu < static_cast<int>(of_cpu_.size()) && of_cpu_[cpu] >= 0;
    return known ? of_cpu_[cpu] : of_thread_[0];
}

std::vector<int64_t> NumaNodes::cut(int64_t total) const {
    std::vector<int64_t> bounds(count() + 1, 0);
    for (int node : of_thread_) ++bounds[node + 1];
    for (int i = 0; i < count(); ++i) bounds[i + 1] += bounds[i];
    for (int64_t& b : bounds) b = total * b / static_cast<int64_t>(of_thread_.size());
    return bounds;
}

void NodeQueues::fill(const std::vector<int64_t>& bounds) {
    for (int i = 0; i < nodes_; ++i) {
        queues_[i].next.store(bounds[i], std::memory_order_relaxed);
        queues_[i].end = bounds[i + 1];
    }
}

int64_t NodeQueues::take(int node) {
    for (int i = 0; i < nodes_; ++i) {
        Queue& q = queues_[(node + i) % nodes_];
        if (q.next.load(std::memory_order_relaxed) >= q.end) continue;
        const int64_t item = q.next.fetch_add(1);
        if (item < q.end) return item;
    }
    return -1;
}

int64_t NodeQueues::peek(int node) const {
    for (int i = 0; i < nodes_; ++i) {
        const Queue& q = queues_[(node + i) % nodes_];
        const int64_t item = q.next.load(std::memory_order_relaxed);
        if (item < q.end) return item;
    }
    return -1;
}

}  // namespace hpcdecode
