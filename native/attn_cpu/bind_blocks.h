// Binds what moves blocks of a KV cache out of its memory and back.
#pragma once
#include <nanobind/nanobind.h>

#include "kv_cache.h"

namespace hpcdecode {

void bind_blocks(nanobind::module_& m, nanobind::class_<KvCache>& kv_cache);

}  // namespace hpcdecode
