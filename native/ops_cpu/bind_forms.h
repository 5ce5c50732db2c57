// Python's view of the forms that packed weights may have.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode::ops {

void bind_forms(nanobind::module_& m);

}  // namespace hpcdecode::ops
