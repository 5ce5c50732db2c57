// Chooses the instance of the kernels for a KV type. Only the file that launches kernels includes this header.
#pragma once
#include <stdexcept>

#include "append.h"
#include "attend.h"
#include "codes.h"
#include "merge.h"

namespace hpcdecode {

inline bool by_tensor(KvType type) { return type != KvType::kF32; }

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

size_t attend_smem(const HeadLayout& head, KvType type) {
    return static_cast<size_t>(Shared::of(head, by_tensor(type)).bytes);
}

}  // namespace hpcdecode
