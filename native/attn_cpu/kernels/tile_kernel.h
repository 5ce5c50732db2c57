// The common part of kernels that work in tiles.
//
// V: The kernel that attends in vector registers if tiles do not fit. Rows: Query rows of one pass. RowTiles: Rows of a
// tile that a query row takes.
#pragma once
#include "tile_unit.h"
#include "tiles.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

using namespace hpcdecode::tiles;

template <class V, int Rows, int RowTiles>
struct TileKernel : V {
    static constexpr bool kTiles = true;
    static constexpr int kRows = Rows;
    static constexpr int kSums = 0;
    static constexpr int kSoftmaxLines = 3;  // prefetched while a row's weights are made; more wait for a line buffer
    struct Unit : TileUnit {
        template <int MR>
        void shape() {
            if constexpr (MR > 16) {
                configure_gemm(16, 16);
            } else {
                configure(RowTiles * MR);
            }
        }
    };
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
