// The kernels of a kind of tile for every number of rows.
#pragma once
#include <utility>

#include "target.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

template <class Kind, class Less>
struct ByRows;

template <class Kind, int... kLess>
struct ByRows<Kind, std::integer_sequence<int, kLess...>> {
    static constexpr TileKernel all[] = {Kind::template kernel<kLess + 1>...};
};

// Kind: Has a TileKernel `kernel` for each number of rows.
template <class Kind, int most = kTileRows>
constexpr const TileKernel* by_rows() {
    return ByRows<Kind, std::make_integer_sequence<int, most>>::all;
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
