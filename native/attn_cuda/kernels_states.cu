// The kernels of recurrent states, for nvcc.
#include "kernels/state_table.h"
#include "launch.h"

namespace hpcdecode {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kMost) states_kernel(const StatesArgs args) {
    Block block = this_block();
    Kernel::run(block, args);
}

}  // namespace

void launch_states(const StatesArgs& a, void* stream) {
    go_through(a, [&](auto kernel, int x, int y, size_t smem, int threads) {
        launch(states_kernel<decltype(kernel)>, "states", a, x, y, smem, stream, threads);
    });
}

}  // namespace hpcdecode
