// The GEMMs of the Python module hpcdecode._ops_cpu, and how weights are packed for them.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode::ops {

void bind_products(nanobind::module_& m);

}  // namespace hpcdecode::ops
