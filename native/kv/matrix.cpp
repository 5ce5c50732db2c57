#include "matrix.h"

#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace

void check_size(const char* name, const Matrix& m, int64_t rows, int64_t columns) {
    if (m.rows == rows && m.columns == columns) return;
    invalid(std::string(name) + ": expected shape [" + std::to_string(rows) + ", " + std::to_string(columns) +
            "], got [" + std::to_string(m.rows) + ", " + std::to_string(m.columns) + "]");
}

void check_layer(int layer, size_t layers) {
    if (layer >= 0 && static_cast<size_t>(layer) < layers) return;
    invalid("layer " + std::to_string(layer) + " is out of range: expected 0 to " + std::to_string(layers - 1));
}

void check_append(const LayerShape& shape, int64_t tokens, const Matrix& kv) {
    check_size("kv", kv, tokens, shape.kv_columns());
}

void check_attend(const LayerShape& shape, int64_t tokens, const Matrix& qkv, const Matrix& out, const float* sinks,
                  int64_t sink_count) {
    check_size("qkv", qkv, tokens, shape.row_columns());
    check_size("out", out, tokens, shape.out_columns());
    if (qkv.type != out.type) invalid("qkv and out: expected the same dtype");
    check_sinks(shape, sinks, sink_count);
}

void check_sinks(const LayerShape& shape, const float* sinks, int64_t sink_count) {
    if (shape.sinks != (sinks != nullptr)) {
        invalid(shape.sinks ? "sinks: this layer has attention sinks, expected [q_heads] float32, got None"
                            : "sinks: this layer was opened without attention sinks, expected None");
    }
    if (sinks != nullptr && sink_count != shape.q_heads) {
        invalid("sinks: expected " + std::to_string(shape.q_heads) + " values, got " + std::to_string(sink_count));
    }
}

}  // namespace hpcdecode
