// One call of a KV cache, which its threads work on together.
#pragma once
#include "kv_cache.h"

namespace hpcdecode {

struct KvCache::Call {
    KvCache* cache;
    int layer;
    const LayerLayout* layout;
    const Matrix* in;
    const Matrix* out;  // null: append only
    int64_t k_column;   // of `in`
    const float* sinks;
    const AttendPlan* plan;
    void (*work)(Call&, int64_t, int);
};

}  // namespace hpcdecode
