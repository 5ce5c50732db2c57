#include <algorithm>
#include <stdexcept>

#include "weights_api.h"

namespace hpcdecode {

ExpandArgs expand_args(ops::WeightForm form, ActType type, int outputs, int64_t inputs) {
    ExpandArgs a{};
    a.type = type;
    a.outputs = outputs;
    a.inputs = inputs;
    a.panels = static_cast<int>((outputs + ops::kOutputs - 1) / ops::kOutputs);
    const bool known = ops::with_layout(form, [&](auto layout) {
        a.scale_bytes = ops::scale_bytes<decltype(layout)>(inputs);
        a.half_bytes = ops::half_bytes<decltype(layout)>(inputs);
    });
    if (!known) throw std::invalid_argument("expected a form of weights in few bits");
    if (const float* numbers = ops::numbers_of(form)) std::copy_n(numbers, 16, a.numbers);
    a.panel_bytes = ops::kOutputs * 4 + 2 * a.half_bytes;
    return a;
}

}  // namespace hpcdecode
