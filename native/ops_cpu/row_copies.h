// Copies of some rows of matrices side by side into memory, and back: what an exchange packs for few sequences, for
// which the calls of a tensor library take longer than the bytes.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "fused_kernel.h"

namespace hpcdecode::ops {

class RowCopies {
  public:
    // rows: of every matrix, in the order of the packed ones. packed: their memory. widths: bytes of a row of each
    // matrix.
    RowCopies(std::vector<int64_t> rows, Rows packed, std::vector<int64_t> widths)
        : rows_(std::move(rows)), packed_(packed), widths_(std::move(widths)) {}

    size_t matrices() const { return widths_.size(); }

    void gather(const std::vector<Rows>& matrices) const {
        each_cell(matrices, [](char* packed, char* row, int64_t bytes) { std::memcpy(packed, row, bytes); });
    }

    void scatter(const std::vector<Rows>& matrices) const {
        each_cell(matrices, [](char* packed, char* row, int64_t bytes) { std::memcpy(row, packed, bytes); });
    }

  private:
    template <typename Copy>
    void each_cell(const std::vector<Rows>& matrices, Copy copy) const {
        char* packed = packed_.data;
        for (int64_t row : rows_) {
            char* cell = packed;
            for (size_t i = 0; i < matrices.size(); ++i) {
                copy(cell, matrices[i].data + row * matrices[i].row_bytes, widths_[i]);
                cell += widths_[i];
            }
            packed += packed_.row_bytes;
        }
    }

    std::vector<int64_t> rows_;
    Rows packed_;
    std::vector<int64_t> widths_;
};

}  // namespace hpcdecode::ops
