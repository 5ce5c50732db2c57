// The table of an instruction set's kernels.
//
// Bf16: The decode kernel of bfloat16. Coded: That of whole numbers. Bf16Words: The words that hold prompts in
// bfloat16.
#pragma once
#include "append.h"
#include "attend_item.h"
#include "partial.h"
#include "prefill_kernel.h"
#include "read.h"
#include "recur.h"
#include "score_item.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <template <class> class Bf16, template <class> class Coded, class Bf16Words>
constexpr KernelTable make_table(const char* name) {
    return KernelTable{
        name,
        {Append<KvStore<StoreF32>>::run, Append<KvStore<StoreF16>>::run, Append<KvStore<StoreBF16>>::run,
         Append<KvStore<StoreI8>>::run, Append<KvStore<StoreI8, StoreI4>>::run, Append<KvStore<StoreI6, StoreI4>>::run},
        {Append<KvStore<StoreF32>>::save, Append<KvStore<StoreF16>>::save, Append<KvStore<StoreBF16>>::save,
         Append<KvStore<StoreI8>>::save, Append<KvStore<StoreI8, StoreI4>>::save,
         Append<KvStore<StoreI6, StoreI4>>::save},
        {Append<KvStore<StoreF32>>::restore, Append<KvStore<StoreF16>>::restore, Append<KvStore<StoreBF16>>::restore,
         Append<KvStore<StoreI8>>::restore, Append<KvStore<StoreI8, StoreI4>>::restore,
         Append<KvStore<StoreI6, StoreI4>>::restore},
        {AttendItem<PlainKernel<KvStore<StoreF32>>>::run, AttendItem<PlainKernel<KvStore<StoreF16>>>::run,
         AttendItem<Bf16<KvStore<StoreBF16>>>::run, AttendItem<Coded<KvStore<StoreI8>>>::run,
         AttendItem<Coded<KvStore<StoreI8, StoreI4>>>::run, AttendItem<Coded<KvStore<StoreI6, StoreI4>>>::run},
        {ScoreItem<PlainKernel<KvStore<StoreF32>>>::run, ScoreItem<PlainKernel<KvStore<StoreF16>>>::run,
         ScoreItem<Bf16<KvStore<StoreBF16>>>::run},
        merge_partials,
        {Prefill<FloatWords>::kernel(), Prefill<Bf16Words>::kernel()},
        read_all,
        rewrite_all,
        {W, recur, recur_scratch_floats},
    };
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
