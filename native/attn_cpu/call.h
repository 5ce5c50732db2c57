// What an engine's threads work on together.
#pragma once
#include "engine.h"

namespace hpcdecode {

struct Engine::Call {
    Engine* engine;
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
