// Chooses the instance of the kernels for a KV type. Only the file that launches kernels includes this header.
#pragma once
#include <stdexcept>

#include "append.h"
#include "attend.h"
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
        default:
            throw std::logic_error("this KV type has no kernels");
    }
}

size_t attend_smem(const HeadLayout& head, KvType type) {
    return static_cast<size_t>(Shared::of(head, by_tensor(type)).bytes);
}

}  // namespace hpcdecode
