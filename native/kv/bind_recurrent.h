// The shapes of recurrent layers in Python. Part of the Python modules only.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "types.h"

namespace hpcdecode {

ActType parse_act_type(const std::string& dtype);  // throws std::invalid_argument

// Binds RecurrentShape. Every module has a class of its own.
void bind_recurrent_shape(nanobind::module_& m);

}  // namespace hpcdecode
