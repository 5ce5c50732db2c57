// Runs the kernels over latents on this machine's cores, block by block.
#include "emulated_blocks.h"
#include "kernels/latent_table.h"

namespace hpcdecode {

void launch_latent(const LatentArgs& a, KvType type, void*) {
    with_latent(type, a.form, [&](auto math) {
        run(
            a.batch.item_count, 1, a.form.smem, [&](Block& b) { latent<typename decltype(math)::Type>(b, a); },
            kLatentThreads);
    });
}

void launch_latent_merge(const LatentArgs& a, void*) {
    run(a.batch.tokens, a.layer.group, kLatentMergeSmem, [&](Block& b) { merge_latent(b, a); });
}

}  // namespace hpcdecode
