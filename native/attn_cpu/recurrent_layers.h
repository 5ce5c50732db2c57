// The recurrent layers of a state store: what kernels are given of them, and where their states lie.
#pragma once
#include <cstddef>
#include <vector>

#include "recur_api.h"
#include "recur_plan.h"
#include "recurrent_shape.h"

namespace hpcdecode {

// Of the rows, and with them of the windows; of the states.
struct StateTypes {
    ActType rows, states;
};

struct RecurrentLayer {
    RecurrentShape shape;
    RecurLayer kernel;         // points into `weights`
    RecurrentWeights weights;  // in the order of RecurLayer
    RecurCost cost;
    size_t state, window;              // bytes from the start of a place
    size_t state_bytes, window_bytes;  // of a sequence
};

// The layers do not move once they are made, because kernels hold addresses of their numbers.
class RecurrentLayers {
  public:
    // width: Floats of a vector of the kernels. Throws std::invalid_argument.
    RecurrentLayers(const std::vector<RecurrentShape>& shapes, std::vector<RecurrentWeights> weights, StateTypes types,
                    int width);
    RecurrentLayers(const RecurrentLayers&) = delete;
    RecurrentLayers& operator=(const RecurrentLayers&) = delete;

    const RecurrentLayer& operator[](size_t i) const { return layers_[i]; }
    size_t size() const { return layers_.size(); }
    size_t place_bytes() const { return place_bytes_; }  // of a sequence, in whole pages

  private:
    std::vector<RecurrentLayer> layers_;
    size_t place_bytes_ = 0;
};

// Returns RecurrentLayers::place_bytes without weights. Throws std::invalid_argument.
size_t place_bytes(const std::vector<RecurrentShape>& shapes, StateTypes types, int width);

}  // namespace hpcdecode
