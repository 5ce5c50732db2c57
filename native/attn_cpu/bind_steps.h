// Binds what a native chain calls in a decode step.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode {

void bind_steps(nanobind::module_& m);  // after bind_states

}  // namespace hpcdecode
