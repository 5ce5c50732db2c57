// The recurrent states' part of the Python module hpcdecode._attn_cpu.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode {

void bind_states(nanobind::module_& m);

}  // namespace hpcdecode
