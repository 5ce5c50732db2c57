// The NUMA nodes that workers run on, and how memory and work are dealt out to them.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace hpcdecode {

// Nodes are counted 0 .. count() - 1 here; `number` is the system's own.
class NumaNodes {
  public:
    // `nodes` names the node of each of `cpus`; empty: one node, unknown. Throws std::invalid_argument.
    NumaNodes(int threads, const std::vector<int>& cpus, const std::vector<int>& nodes);

    int count() const { return static_cast<int>(numbers_.size()); }
    int number(int node) const { return numbers_[node]; }  // -1: unknown
    int of_thread(int thread) const;                       // of thread 0, the caller, which may move: where it runs now
    std::vector<int64_t> cut(int64_t total) const;         // count() + 1 bounds, in proportion to the nodes' threads

  private:
    std::vector<int> numbers_;
    std::vector<int> of_thread_;
    std::vector<int> of_cpu_;  // -1: not one of ours
};

// The items of a job, one queue a node. A thread empties its own node's queue first, then helps the others.
class NodeQueues {
  public:
    explicit NodeQueues(int nodes) : queues_(new Queue[nodes]), nodes_(nodes) {}
    void fill(const std::vector<int64_t>& bounds);  // node i: items bounds[i] .. bounds[i + 1] - 1
    int64_t take(int node);                         // -1: none left

  private:
    struct alignas(64) Queue {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    std::unique_ptr<Queue[]> queues_;
    int nodes_;
};

}  // namespace hpcdecode
