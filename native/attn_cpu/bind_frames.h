#pragma once
#include <nanobind/nanobind.h>

#include "kv_cache.h"

namespace hpcdecode {

// Binds what the owner of a KV cache with frames needs.
void bind_frames(nanobind::class_<KvCache>& kv_cache);

}  // namespace hpcdecode
