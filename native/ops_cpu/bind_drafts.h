// Python's view of drafts.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode::ops {

void bind_drafts(nanobind::module_& m);

}  // namespace hpcdecode::ops
