#include "affinity.h"

#include <sched.h>

#include <stdexcept>
#include <string>

namespace hpcdecode {

void check_cpus(int threads, const std::vector<int>& cpus) {
    if (threads < 1 || threads > 4096) {
        throw std::invalid_argument("threads: expected 1 to 4096, got " + std::to_string(threads));
    }
    if (cpus.empty()) return;
    if (static_cast<int>(cpus.size()) != threads) {
        throw std::invalid_argument("cpus: expected one CPU per thread (" + std::to_string(threads) + "), got " +
                                    std::to_string(cpus.size()));
    }
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)) {
            throw std::invalid_argument("cpus: CPU " + std::to_string(cpu) + " is not in this process's affinity mask");
        }
    }
}

void pin(int cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

}  // namespace hpcdecode
