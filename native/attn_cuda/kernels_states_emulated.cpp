// Runs the kernels of recurrent states on this machine's cores, block by block.
#include "emulated_blocks.h"
#include "kernels/state_table.h"

namespace hpcdecode {

void launch_states(const StatesArgs& a, void*) {
    go_through(a, [&](auto kernel, int x, int y, size_t smem, int threads) {
        run(x, y, smem, [&](Block& b) { kernel.run(b, a); }, threads);
    });
}

}  // namespace hpcdecode
