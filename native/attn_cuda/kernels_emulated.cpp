// Runs the kernels on this machine's cores, block by block.
#include "emulated_blocks.h"
#include "kernels/table.h"

namespace hpcdecode {

void launch_append(const AppendArgs& a, KvType type, void*) {
    with_num(type, [&](auto num) {
        run(a.batch.tokens, a.layer.heads, append_smem(a.layer.head), [&](Block& b) { append<decltype(num)>(b, a); });
    });
}

void launch_attend(const AttendArgs& a, KvType type, void*) {
    with_num(type, [&](auto num) {
        with_attend<decltype(num)>(a.layer.head, a.form, [&](auto kernel) {
            run(a.batch.item_count, a.layer.heads, a.form.smem,
                [&](Block& b) { attend<typename decltype(kernel)::Type>(b, a); });
        });
    });
}

void launch_merge(const MergeArgs& a, void*) {
    run(a.batch.tokens, a.layer.heads * a.layer.group, kMergeSmem, [&](Block& b) { merge(b, a); });
}

void launch_copy(const CopyArgs& a, void*) {
    run(a.copies, a.layer_count, 0, [&](Block& b) { copy_blocks(b, a); });
}

}  // namespace hpcdecode
