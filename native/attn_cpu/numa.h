// The NUMA nodes that workers run on, and their shares of memory and work.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace hpcdecode {

// Nodes are 0 .. count() - 1 here; `number` returns the system's number.
class NumaNodes {
  public:
    // nodes: Node of each of `cpus`, or empty for one unknown node. Throws std::invalid_argument.
    NumaNodes(int threads, const std::vector<int>& cpus, const std::vector<int>& nodes);

    int count() const { return static_cast<int>(numbers_.size()); }
    int number(int node) const { return numbers_[node]; }  // -1: unknown
    int of_thread(int thread) const;                       // thread 0 is the caller, which may move: its node now
    std::vector<int64_t> cut(int64_t total) const;         // bounds [count() + 1], in proportion to the nodes' threads

  private:
    std::vector<int> numbers_;
    std::vector<int> of_thread_;
    std::vector<int> of_cpu_;  // -1: not one of ours
};

// The items of a job, in one queue per node. A thread empties its own node's queue first, then helps the others.
class NodeQueues {
  public:
    explicit NodeQueues(int nodes) : queues_(new Queue[nodes]), nodes_(nodes) {}
    void fill(const std::vector<int64_t>& bounds);  // node i: items bounds[i] .. bounds[i + 1] - 1
    int64_t take(int node);                         // -1: none left
    int64_t peek(int node) const;                   // what `take` returns if no other thread is faster

  private:
    struct alignas(64) Queue {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    std::unique_ptr<Queue[]> queues_;
    int nodes_;
};

}  // namespace hpcdecode
