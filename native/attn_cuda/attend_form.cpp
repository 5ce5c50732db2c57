#include "kernels/attend_shared.h"
#include "kernels/float_shared.h"

namespace hpcdecode {
namespace {

constexpr int kMostStages = 4;
constexpr int kThirdOfSm = 70 << 10;  // bytes of slices of a block, so that an SM has room for three on an H100

int slices_of(const AttendShared& s) { return kWarps * s.warp; }

}  // namespace

AttendForm attend_form(const HeadLayout& head, KvType type, ActType act, size_t limit) {
    AttendForm f{};
    if (type == KvType::kF32) {
        f.smem = FloatShared::of(head).bytes;
        return f;
    }
    f.parts = act == ActType::kF32 ? 2 : 1;
    for (f.stages = kMostStages; f.stages > 0; --f.stages) {
        const AttendShared s = AttendShared::of(head, f);
        f.smem = s.bytes;
        if (f.stages == 1 || (static_cast<size_t>(f.smem) <= limit && (f.stages == 2 || slices_of(s) <= kThirdOfSm)))
            break;
    }
    return f;
}

}  // namespace hpcdecode
