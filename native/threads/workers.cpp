#include "workers.h"

#include "team.h"
#include "thread_pool.h"

namespace hpcdecode {

std::shared_ptr<Workers> make_workers(bool team, int threads, const std::vector<int>& cpus) {
    if (team && has_team()) return std::make_shared<TeamWorkers>(threads, cpus);
    return std::make_shared<ThreadPool>(threads, cpus);
}

}  // namespace hpcdecode
