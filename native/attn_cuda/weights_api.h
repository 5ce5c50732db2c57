// Weights in few bits, packed as native/ops_cpu/weight_form.h describes, expanded to matrices on a device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../ops_cpu/weight_form.h"
#include "types.h"

namespace hpcdecode {

// A weight of one expert or of several, each of which begins with a panel of its own.
struct ExpandArgs {
    const uint8_t* packed;  // [experts * panels] panels
    void* out;              // [experts, outputs, inputs]
    ActType type;           // of out
    int panels;             // of an expert
    int outputs;            // of an expert
    int64_t inputs;
    int64_t panel_bytes, half_bytes, scale_bytes;  // of half a panel, and of what that begins with
    float numbers[16];                             // that codes stand for, of forms that have a table of them
};

// Returns the arguments but the addresses. Throws std::invalid_argument for a form that is not in few bits.
ExpandArgs expand_args(ops::WeightForm form, ActType type, int outputs, int64_t inputs);

// Launches the kernel of a form in few bits on a stream. Throws std::runtime_error if the device refuses.
void launch_expand(const ExpandArgs& args, ops::WeightForm form, int experts, void* stream);

}  // namespace hpcdecode
