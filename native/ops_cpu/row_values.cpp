#include "row_values.h"

#include <utility>

namespace hpcdecode::ops {
namespace {

thread_local std::vector<std::vector<char>> spare;  // a GEMM of updates runs while another one's rows are in use

}  // namespace

RowValues::RowValues(ValuesKernel kernel, int64_t rows, const Rows& x, int64_t words) : rows_(x) {
    if (kernel == nullptr) return;
    if (!spare.empty()) {
        memory_ = std::move(spare.back());
        spare.pop_back();
    }
    const int64_t lines = (kValueWords * words * static_cast<int64_t>(sizeof(uint32_t)) + kLine - 1) / kLine;
    const int64_t apart = (lines | 1) * kLine;  // an odd number of cache lines, so that rows share no cache sets
    const auto needed = static_cast<size_t>(rows * apart + kLine);
    if (memory_.size() < needed) memory_.resize(needed);
    rows_ = {memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & (kLine - 1)), apart};
    for (int64_t r = 0; r < rows; ++r) kernel(words, x.data + r * x.row_bytes, rows_.data + r * apart);
}

RowValues::~RowValues() {
    if (!memory_.empty()) spare.push_back(std::move(memory_));
}

}  // namespace hpcdecode::ops
