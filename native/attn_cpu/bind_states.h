// The recurrent states' part of the Python module hpcdecode._attn_cpu.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "types.h"

namespace hpcdecode {

ActType parse_act_type(const std::string& dtype);  // throws std::invalid_argument

void bind_states(nanobind::module_& m);

}  // namespace hpcdecode
