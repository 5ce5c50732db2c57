// Runs the kernels that expand weights on this machine's cores, block by block.
#include "emulated_blocks.h"
#include "kernels/expand.h"

namespace hpcdecode {

void launch_expand(const ExpandArgs& a, ops::WeightForm form, int experts, void*) {
    ops::with_layout(form, [&](auto layout) {
        run(experts * a.panels * 2, expand_runs(a), 0, [&](Block& b) { expand<decltype(layout)>(b, a); });
    });
}

}  // namespace hpcdecode
