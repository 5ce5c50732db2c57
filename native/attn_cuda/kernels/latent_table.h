// Chooses the instance of the kernel over latents. Only the file that launches kernels includes this header.
#pragma once
#include <stdexcept>

#include "latent.h"
#include "latent_merge.h"

namespace hpcdecode {

template <class Math>
struct LatentMath {
    using Type = Math;
};

// Calls `use` with the LatentMath of a form.
template <class Num, class F>
void with_tensor(const LatentForm& f, F&& use) {
    if (f.parts == 2) return use(LatentMath<LatentByTensor<Num, 1, 2>>{});
    if (f.rows == kTensorRows) return use(LatentMath<LatentByTensor<Num, 1, 1>>{});
    return use(LatentMath<LatentByTensor<Num, 2, 1>>{});
}
template <class F>
void with_latent(KvType type, const LatentForm& f, F&& use) {
    switch (type) {
        case KvType::kF32:
            return use(LatentMath<LatentByFloat>{});
        case KvType::kF16:
            return with_tensor<NumF16>(f, use);
        case KvType::kBF16:
            return with_tensor<NumBF16>(f, use);
        default:
            throw std::logic_error("latents of this KV type have no kernels");
    }
}

}  // namespace hpcdecode
