// Tiles that are compiled for every number of rows.
#pragma once
#include <utility>

#include "target.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

template <class Kind, class Less>
struct ByRows;

template <class Kind, int... kLess>
struct ByRows<Kind, std::integer_sequence<int, kLess...>> {
    static void compute(const Tile& tile, int rows) {
        static constexpr void (*kKernels[])(const Tile&) = {Kind::template kernel<kLess + 1>...};
        kKernels[rows - 1](tile);
    }
};

// Kind: Has a function `kernel` of a tile for each number of rows.
template <class Kind, int most = kTileRows>
constexpr TileKernel by_rows = ByRows<Kind, std::make_integer_sequence<int, most>>::compute;

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
