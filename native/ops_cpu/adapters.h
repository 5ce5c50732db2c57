// Updates of a GEMM's outputs by adapters (LoRA): y += B_a h with h = A_a x, for each row that has an adapter a.
//
// Rows of one adapter are multiplied together. A row's bits depend on nothing but the row and its adapter (product.h).
#pragma once
#include <cstdint>
#include <vector>

#include "adapter_rows.h"
#include "product.h"

namespace hpcdecode::ops {

// h = A_a x.
class AdapterProduct {
  public:
    // product: The GEMM of one adapter. adapters: Their number; their packed weights follow on each other.
    // Throws std::invalid_argument.
    AdapterProduct(const Product& product, int64_t adapters);

    // Computes the share of one of `members` threads. Rows of `out` without an adapter stay as they are.
    // adapters: Of each row, int64; others than those of this product stand for none.
    void run(int64_t rows, const Rows& adapters, const Rows& x, const Rows& weight, const Rows& out, int member,
             int members) const;

  private:
    Product product_;
    int64_t adapters_;
};

// What is added to some rows, panel after panel. Several are computed together, so that a B is read in order.
class PanelUpdate {
  public:
    // product: The GEMM B h of one of `adapters` adapters. rows, own: Those that are asked for.
    PanelUpdate(const Product& product, int64_t adapters, const Update& update, const RowRange& rows,
                const Panels& own);

    bool empty() const { return rows_.empty(); }

    // Adds to the first columns of a panel's outputs for `count` rows from `row` on. Panels come in order.
    void add(int64_t panel, int64_t row, int64_t count, int columns, const Rows& outputs);

  private:
    void compute(int64_t panel);

    const Product& product_;
    const Update& update_;
    AdapterRows rows_;
    int64_t first_, last_panel_, apart_;
    Panels computed_{0, 0};
    std::vector<int64_t> places_;  // in the order of `rows_`, by row
    std::vector<char> added_;
    std::vector<std::vector<char>> memory_;  // by run
    std::vector<Rows> low_;                  // by run
};

// y + B_a h, where y is no GEMM's output as it is.
class AdapterSum {
  public:
    // product: The GEMM B h of one adapter. Throws std::invalid_argument.
    AdapterSum(const Product& product, int64_t adapters);

    // Computes the panels of one of `members` threads. Rows without an adapter are copied.
    void run(int64_t rows, const Update& update, const Rows& y, const Rows& out, int member, int members) const;

  private:
    Product product_;
    int64_t adapters_;
};

}  // namespace hpcdecode::ops
