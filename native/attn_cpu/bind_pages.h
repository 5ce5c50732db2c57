#pragma once
#include <nanobind/nanobind.h>

#include "kv_cache.h"

namespace hpcdecode {

// Binds what decides which pages of a KV cache with frames move.
void bind_pages(nanobind::module_& m, nanobind::class_<KvCache>& kv_cache);

}  // namespace hpcdecode
