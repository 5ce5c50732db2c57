// A recurrent layer whose states are on a device.
#pragma once
#include "device.h"
#include "matrix.h"
#include "recurrent_shape.h"
#include "states_api.h"

namespace hpcdecode {

// What a layer keeps, and its weights, on the device; see StatesLayer. The caller keeps them while the layer lives.
struct RecurrenceMemory {
    const float *convolution, *bias, *rate, *skip;  // null where the layer has none
    float* windows;
    void* states;
};

// Returns whether there are kernels for a layer.
bool serves_states(const RecurrentShape& shape);

class Recurrence {
  public:
    // Throws std::invalid_argument for a shape that makes no sense or has no kernels.
    Recurrence(const RecurrentShape& shape, ActType states, const RecurrenceMemory& memory, int device);

    // Takes tokens through the layer. sequences: int32 [3, count] on the device: places, tokens, first rows. longest:
    // Most tokens of one. inputs: float32 [rows, channels] on the device for what the convolution gives, or null where
    // the layer has none or keeps nothing else. Throws std::invalid_argument for matrices of other sizes.
    void advance(const int32_t* sequences, int count, int longest, const Matrix& rows, const Matrix& out, float* inputs,
                 Stream stream) const;

  private:
    const RecurrentShape shape_;
    const int device_;
    StatesLayer layer_;
};

}  // namespace hpcdecode
