#include "kernels/latent_shared.h"

namespace hpcdecode {

LatentForm latent_form(const LayerArgs& layer, KvType type, ActType act, size_t limit) {
    const bool tensor = type != KvType::kF32;
    LatentForm f{};
    f.tile = tensor ? kTensorTile : kFloatTile;
    f.parts = tensor && act == ActType::kF32 ? 2 : 1;
    const int most = !tensor ? kFloatRows : f.parts == 1 && layer.group > kTensorRows ? 2 * kTensorRows : kTensorRows;
    for (f.rows = most; f.rows >= (tensor ? kTensorRows : kFloatRows); f.rows /= 2) {
        for (f.stages = 2; f.stages > 0; --f.stages) {
            f.smem = LatentShared::of(layer.head, f).bytes;
            if (static_cast<size_t>(f.smem) <= limit) return f;
        }
    }
    f.rows = 0;
    f.stages = 1;
    return f;
}

}  // namespace hpcdecode
