// The kernels of the device over latents, for nvcc.
#include "kernels/latent_table.h"
#include "launch.h"

namespace hpcdecode {
namespace {

template <class Math>
__global__ void __launch_bounds__(kLatentThreads, 1) latent_kernel(const LatentArgs args) {
    Block block = this_block();
    latent<Math>(block, args);
}
__global__ void __launch_bounds__(kThreads) merge_latent_kernel(const LatentArgs args) {
    Block block = this_block();
    merge_latent(block, args);
}

}  // namespace

void launch_latent(const LatentArgs& a, KvType type, void* stream) {
    with_latent(type, a.form, [&](auto math) {
        launch(latent_kernel<typename decltype(math)::Type>, "latent", a, a.batch.item_count, 1, a.form.smem, stream,
               kLatentThreads);
    });
}

void launch_latent_merge(const LatentArgs& a, void* stream) {
    launch(merge_latent_kernel, "merge of latents", a, a.batch.tokens, a.layer.group, kLatentMergeSmem, stream);
}

}  // namespace hpcdecode
