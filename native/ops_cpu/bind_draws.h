// Python's view of how tokens are drawn from logits.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode::ops {

void bind_draws(nanobind::module_& m);

}  // namespace hpcdecode::ops
