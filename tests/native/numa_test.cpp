// Where memory comes from and who does which work, on the NUMA nodes that this machine has and on pretended ones.
#include "numa.h"

#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kv_cache.h"
#include "state_store.h"

using namespace hpcdecode;

namespace {

const LayerShape kShape{2, 64, 64, 4, 0.125f, {}, 0, false};
constexpr int64_t kKvColumns = 2 * (64 + 64), kColumns = 4 * 64 + kKvColumns;

struct Machine {
    std::vector<int> cpus, nodes;
};

int node_of(int cpu) {
    for (int node = 0; node < 1024; ++node) {
        struct stat found;
        const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/node" + std::to_string(node);
        if (stat(path.c_str(), &found) == 0) return node;
    }
    return 0;
}

Machine this_machine() {
    Machine m;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        m.cpus.push_back(cpu);
        m.nodes.push_back(node_of(cpu));
    }
    return m;
}

int node_of_page(const void* at) {
    void* page = const_cast<void*>(at);
    int node = -1;
    syscall(SYS_move_pages, 0, 1ul, &page, nullptr, &node, 0);
    return node;
}

void fill(KvCache& e, int32_t slot, int32_t tokens) {
    std::vector<float> kv(tokens * kKvColumns, 0.5f);
    e.extend(&slot, &tokens, 1);
    for (int layer = 0; layer < static_cast<int>(e.pool().layers().size()); ++layer)
        e.append(layer, &slot, &tokens, 1, {kv.data(), ActType::kF32, tokens, kKvColumns, kKvColumns});
}

// Blocks of 64 KiB: all pages of a sequence lie on its home, and the homes take turns.
void memory_lies_on_its_home() {
    const Machine m = this_machine();
    const int threads = static_cast<int>(m.cpus.size());
    const NumaNodes nodes(threads, m.cpus, m.nodes);
    KvCache e({kShape, kShape}, {KvType::kF32, 64 * 64, 8, 64, threads, m.cpus, "", m.nodes});
    std::vector<int> sequences(nodes.count(), 0);
    for (int slot = 0; slot < 8; ++slot) {
        fill(e, slot, 256);
        ++sequences[e.pool().home(slot)];
        const int expected = nodes.number(e.pool().home(slot));
        for (int layer = 0; layer < 2; ++layer) {
            const HeadView view = e.pool().view(layer, 0, slot);
            for (int block = 0; block < 4; ++block) {
                const int node = node_of_page(view.base + view.blocks[block] * view.block_bytes + view.block_bytes / 2);
                CHECK(node == expected, "slot %d, layer %d, block %d: on node %d, home is %d", slot, layer, block, node,
                      expected);
            }
        }
    }
    for (int i = 0; i < nodes.count(); ++i)
        CHECK(sequences[i] == 8 / nodes.count(), "node %d has %d of 8 sequences", nodes.number(i), sequences[i]);
    std::printf("%d NUMA nodes, %d CPUs\n", nodes.count(), threads);
}

void full_home_spills() {
    const Machine m = this_machine();
    const std::vector<int> cpus(3, m.cpus[0]), pretended = {7, 3, 7};  // shares of 2 and 4 blocks
    KvCache e({kShape}, {KvType::kBF16, 6 * 16, 4, 16, 3, cpus, "", pretended});
    const BlockPool& s = e.pool();
    CHECK(s.nodes() == 2 && s.free_blocks(0) == 2 && s.free_blocks(1) == 4, "%lld and %lld blocks",
          static_cast<long long>(s.free_blocks(0)), static_cast<long long>(s.free_blocks(1)));
    fill(e, 0, 5 * 16);  // more than any node has
    CHECK(s.home(0) == 1 && s.free_blocks(1) == 0 && s.free_blocks(0) == 1, "no spill");
    e.fork(0, 1);
    CHECK(s.home(1) == 1, "a fork left its parent's node");
    e.check();
    const int32_t both[] = {0, 1};
    e.release(both, 2);
    e.check();
    CHECK(s.free_blocks(0) == 2 && s.free_blocks(1) == 4, "blocks did not return to their nodes");
}

std::vector<float> decoded(const std::vector<int>& cpus, const std::vector<int>& nodes) {
    const int threads = static_cast<int>(cpus.size());
    KvCache e({kShape}, {KvType::kBF16, 20000, 8, 16, threads, cpus, "", nodes});
    const std::vector<int32_t> slots = {5, 1, 0, 3, 2}, counts = {1, 1, 70, 2, 1};
    for (int i = 0; i < 5; ++i) fill(e, slots[i], 3000 / (i + 1));
    std::vector<float> qkv(75 * kColumns), out(75 * 4 * 64, 0.0f);
    for (size_t i = 0; i < qkv.size(); ++i) qkv[i] = static_cast<float>(i * 2654435761u % 1000) / 500 - 1;
    e.extend(slots.data(), counts.data(), 5);
    e.attend(0, slots.data(), counts.data(), 5, {qkv.data(), ActType::kF32, 75, kColumns, kColumns},
             {out.data(), ActType::kF32, 75, 256, 256}, nullptr, 0);
    e.check();
    return out;
}

void same_bits_on_any_topology() {
    const int cpu = this_machine().cpus[0];
    const std::vector<float> one = decoded({cpu}, {});
    CHECK(one == decoded({cpu, cpu, cpu, cpu}, {0, 1, 0, 1}), "two nodes");
    CHECK(one == decoded({cpu, cpu, cpu}, {2, 1, 0}), "three nodes");
}

// All pages of a sequence's states lie on its home, and the homes take turns. Released pages leave it.
void states_lie_on_their_homes() {
    const Machine m = this_machine();
    const int threads = static_cast<int>(m.cpus.size());
    const NumaNodes nodes(threads, m.cpus, m.nodes);
    const RecurrentShape shape{8, 8, 64, 64, 0, false, false, false, 1.0f, 1, true, false};
    StateStore store({shape, shape}, {{}, {}},
                     {{ActType::kF32, ActType::kF32}, 8, threads, m.cpus, "", m.nodes, false, nullptr});
    std::vector<int> sequences(nodes.count(), 0);
    const int32_t slots[] = {3, 0, 6, 1, 7, 2, 5, 4}, ones[] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int i = 0; i < 8; ++i) {
        store.extend(&slots[i], ones, 1);
        ++sequences[store.home(slots[i])];
    }
    for (int slot = 0; slot < 8; ++slot) {
        const int expected = nodes.number(store.home(slot));
        for (size_t at = 2048; at < store.state_bytes(); at += 64 << 10) {
            const int node = node_of_page(store.place(slot) + at);
            CHECK(node == expected, "slot %d, byte %zu: on node %d, home is %d", slot, at, node, expected);
        }
    }
    for (int i = 0; i < nodes.count(); ++i)
        CHECK(sequences[i] == 8 / nodes.count(), "node %d has %d of 8 states", nodes.number(i), sequences[i]);
    const uint8_t* place = store.place(6) + 4096;
    store.release(&slots[2], 1);
    CHECK(node_of_page(place) < 0, "a released page is still there");
}

void every_item_is_taken_once() {
    NodeQueues queues(3);
    queues.fill({0, 100, 100, 250});
    CHECK(queues.take(0) == 0 && queues.take(2) == 100, "a node's own items come first");
    CHECK(queues.take(1) == 101, "an empty node helps the next");
    std::vector<std::atomic<int>> taken(250);
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i)
        threads.emplace_back([&, i] {
            for (int64_t item; (item = queues.take(i % 3)) >= 0;) ++taken[item];
        });
    for (std::thread& t : threads) t.join();
    for (int i = 0; i < 250; ++i) CHECK(taken[i] == (i == 0 || i == 100 || i == 101 ? 0 : 1), "item %d", i);
}

}  // namespace

int main() {
    memory_lies_on_its_home();
    full_home_spills();
    same_bits_on_any_topology();
    states_lie_on_their_homes();
    every_item_is_taken_once();
    return report("numa");
}
