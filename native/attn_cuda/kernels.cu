// The kernels of the device, for nvcc.
#include "kernels/table.h"
#include "launch.h"

namespace hpcdecode {
namespace {

template <class Num>
__global__ void __launch_bounds__(kThreads) append_kernel(const AppendArgs args) {
    Block block = this_block();
    append<Num>(block, args);
}
template <class Kernel>
__global__ void __launch_bounds__(kThreads, Kernel::kBlocks) attend_kernel(const AttendArgs args) {
    Block block = this_block();
    attend<Kernel>(block, args);
}
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeArgs args) {
    Block block = this_block();
    merge(block, args);
}
__global__ void __launch_bounds__(kThreads) copy_kernel(const CopyArgs args) {
    Block block = this_block();
    copy_blocks(block, args);
}

}  // namespace

void launch_append(const AppendArgs& a, KvType type, void* stream) {
    with_num(type, [&](auto num) {
        launch(append_kernel<decltype(num)>, "append", a, a.batch.tokens, a.layer.heads, append_smem(a.layer.head),
               stream);
    });
}

void launch_attend(const AttendArgs& a, KvType type, void* stream) {
    with_num(type, [&](auto num) {
        with_attend<decltype(num)>(a.layer.head, a.form, [&](auto kernel) {
            launch(attend_kernel<typename decltype(kernel)::Type>, "attend", a, a.batch.item_count, a.layer.heads,
                   a.form.smem, stream);
        });
    });
}

void launch_merge(const MergeArgs& a, void* stream) {
    launch(merge_kernel, "merge", a, a.batch.tokens, a.layer.heads * a.layer.group, kMergeSmem, stream);
}

void launch_copy(const CopyArgs& a, void* stream) {
    launch(copy_kernel, "copy", a, a.copies, a.layer_count, 0, stream);
}

}  // namespace hpcdecode
