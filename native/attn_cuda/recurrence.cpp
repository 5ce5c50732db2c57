#include "recurrence.h"

#include <stdexcept>

namespace hpcdecode {

bool serves_states(const RecurrentShape& s) {
    if (s.compress_rate > 0) return false;
    if (s.k_dim == 0) return true;
    return s.v_dim == 1 ? s.k_dim <= kMostLaneRows : s.v_dim % 4 == 0 && s.k_dim <= kMostHeadRows;
}

Recurrence::Recurrence(const RecurrentShape& s, ActType states, const RecurrenceMemory& memory, int device)
    : shape_(s), device_(device) {
    check_recurrent(s);
    if (!serves_states(s)) throw std::invalid_argument("expected a layer that there are kernels for");
    if ((s.taps > 0 && !memory.convolution) || (s.taps > 1 && !memory.windows) || (s.has_rate && !memory.rate) ||
        (s.k_dim > 0 && !memory.states))
        throw std::invalid_argument("expected the weights and the memory that the layer's shape needs");
    layer_ = {s.heads,        s.k_heads,    s.k_dim,
              s.v_dim,        s.taps,       s.decay_dim,
              s.silu,         s.delta,      s.normalised,
              s.has_beta,     s.has_rate,   states == ActType::kBF16,
              s.scale,        s.channels(), memory.convolution,
              memory.bias,    memory.rate,  memory.skip,
              memory.windows, memory.states};
}

void Recurrence::advance(const int32_t* sequences, int count, int longest, const Matrix& rows, const Matrix& out,
                         float* inputs, Stream stream) const {
    check_size("rows", rows, rows.rows, shape_.row_columns(rows.type));
    check_size("out", out, rows.rows, shape_.out_columns());
    if (out.type != rows.type) throw std::invalid_argument("out: expected the dtype of rows");
    if (shape_.taps > 0 && shape_.k_dim > 0 && !inputs) throw std::invalid_argument("inputs: expected memory for them");
    if (count == 0) return;
    const Using used(device_);
    launch_states({layer_, sequences, count, longest, rows.data, out.data, rows.type, rows.stride, out.stride,
                   shape_.taps > 0 && shape_.k_dim > 0 ? inputs : nullptr},
                  stream);
}

}  // namespace hpcdecode
