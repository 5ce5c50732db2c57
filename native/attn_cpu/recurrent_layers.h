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
    // Rows of the last tokens, that of position p in row p % window_rows: what a convolution reads, and all of those
    // tokens that are not in the state yet. Elements of a row: without the latter its channels.
    int64_t window_rows, window_columns;
};

// Some bytes of a state: `pieces` times `bytes`, `stride` apart.
struct StatePart {
    size_t offset, bytes, stride;
    int pieces;
};

// The layers do not move once they are made, because kernels hold addresses of their numbers.
class RecurrentLayers {
  public:
    // width: Floats of a vector of the kernels. lookahead: The most tokens of a sequence that are not in its states
    // yet. Throws std::invalid_argument.
    RecurrentLayers(const std::vector<RecurrentShape>& shapes, std::vector<RecurrentWeights> weights, StateTypes types,
                    int width, int lookahead);
    RecurrentLayers(const RecurrentLayers&) = delete;
    RecurrentLayers& operator=(const RecurrentLayers&) = delete;

    const RecurrentLayer& operator[](size_t i) const { return layers_[i]; }
    size_t size() const { return layers_.size(); }
    size_t place_bytes() const { return place_bytes_; }  // of a sequence, in whole pages
    // Returns what some neighbouring heads have of a layer's state.
    StatePart part(const RecurrentLayer& layer, int first_head, int last_head) const;

  private:
    std::vector<RecurrentLayer> layers_;
    StateTypes types_;
    int width_;
    size_t place_bytes_ = 0;
};

// Returns RecurrentLayers::place_bytes without weights. Throws std::invalid_argument.
size_t place_bytes(const std::vector<RecurrentShape>& shapes, StateTypes types, int width, int lookahead);

}  // namespace hpcdecode
