// The prompt attention's part of the Python module hpcdecode._attn_cpu.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcdecode {

void bind_prompts(nanobind::module_& m);

}  // namespace hpcdecode
