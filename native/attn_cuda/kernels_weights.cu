// The kernels of the device that expand weights, for nvcc.
#include "kernels/expand.h"
#include "launch.h"

namespace hpcdecode {
namespace {

template <class Layout>
__global__ void __launch_bounds__(kThreads) expand_kernel(const ExpandArgs args) {
    Block block = this_block();
    expand<Layout>(block, args);
}

}  // namespace

void launch_expand(const ExpandArgs& a, ops::WeightForm form, int experts, void* stream) {
    ops::with_layout(form, [&](auto layout) {
        launch(expand_kernel<decltype(layout)>, "expand", a, experts * a.panels * 2, expand_runs(a), 0, stream);
    });
}

}  // namespace hpcdecode
