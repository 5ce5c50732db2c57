#include "row_values.h"

#include <utility>

#include "row_memory.h"

namespace hpcdecode::ops {
namespace {

thread_local std::vector<std::vector<char>> spare;  // a GEMM of updates runs while another one's rows are in use

}  // namespace

RowValues::RowValues(ValuesKernel kernel, int64_t rows, const Rows& x, int64_t words, int64_t bytes) : rows_(x) {
    if (kernel == nullptr) return;
    if (!spare.empty()) {
        memory_ = std::move(spare.back());
        spare.pop_back();
    }
    rows_ = rows_in(memory_, rows, bytes);
    for (int64_t r = 0; r < rows; ++r) kernel(words, x.data + r * x.row_bytes, rows_.data + r * rows_.row_bytes);
}

RowValues::~RowValues() {
    if (!memory_.empty()) spare.push_back(std::move(memory_));
}

}  // namespace hpcdecode::ops
