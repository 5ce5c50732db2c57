// The recurrent states' part of the Python module hpcdecode._attn_cuda.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode {

void bind_recurrence(nanobind::module_& m);

}  // namespace hpcdecode
