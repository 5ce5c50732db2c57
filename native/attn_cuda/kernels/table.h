// Chooses the instance of the kernels for a KV type. Only the file that launches kernels includes this header.
#pragma once
#include <stdexcept>

#include "append.h"
#include "attend_by_float.h"
#include "attend_by_tensor.h"
#include "codes.h"
#include "merge.h"

namespace hpcdecode {

template <class Kernel>
struct AttendKernel {
    using Type = Kernel;
};

// Calls `use` with a value of the type's Num.
template <class F>
void with_num(KvType type, F&& use) {
    switch (type) {
        case KvType::kF32:
            return use(NumF32{});
        case KvType::kF16:
            return use(NumF16{});
        case KvType::kBF16:
            return use(NumBF16{});
        case KvType::kI8:
            return use(NumI8{});
        case KvType::kK8V4:
            return use(NumK8V4{});
        case KvType::kI4:
            return use(NumI4{});
        default:
            throw std::logic_error("this KV type has no kernels");
    }
}

// Returns the bytes of shared memory of a block that appends.
inline size_t append_smem(const HeadLayout& head) {
    return (kWarps + static_cast<size_t>(head.k_dim > head.v_dim ? head.k_dim : head.v_dim)) * sizeof(float);
}

// Calls `use` with the AttendKernel of a type, heads and a form.
template <class Num, class F>
void with_attend(const HeadLayout& h, const AttendForm& f, F&& use) {
    const bool wide = h.k_pad > 128 || h.v_pad > 128;
    if constexpr (!Num::kTensor) {
        return wide ? use(AttendKernel<AttendByFloat<8>>{}) : use(AttendKernel<AttendByFloat<4>>{});
    } else {
        if (f.parts == 1)
            return wide ? use(AttendKernel<AttendByTensor<Num, true, 1>>{})
                        : use(AttendKernel<AttendByTensor<Num, false, 1>>{});
        return wide ? use(AttendKernel<AttendByTensor<Num, true, 2>>{})
                    : use(AttendKernel<AttendByTensor<Num, false, 2>>{});
    }
}

// Grid of the kernel: item, KV head.
template <class Kernel>
HPC_DEVICE void attend(Block& block, const AttendArgs& a) {
    Kernel(block, a).run();
}

}  // namespace hpcdecode
