// A piece of a sequence and the query rows that attend over it.
#pragma once
#include "place.h"

namespace hpcdecode {

struct PieceRows {
    const LayerArgs& layer;
    Item item;
    SequenceArgs sequence;
    int most, tile;        // query rows of an item, tokens of a tile
    int rows, begin, end;  // query rows; positions, from the first one of a tile
    int low, high;         // all rows see the positions [low, high)

    HPC_DEVICE PieceRows(const BatchArgs& batch, const LayerArgs& layer, int index, int most, int piece, int tile)
        : layer(layer), item(batch.items[index]), sequence(batch.sequences[item.sequence]), most(most), tile(tile) {
        const int left = sequence.count * layer.group - item.row_block * most;
        rows = left < most ? left : most;
        const Span first = seen(0), last = seen(rows - 1);
        low = last.low;
        high = first.high;
        begin = item.piece * piece;
        end = begin + piece;
        if (first.low > begin) begin = first.low / tile * tile;
        if (last.high < end) end = last.high;
    }

    // The positions that a row sees; none for rows that pad a block.
    HPC_DEVICE Span seen(int row) const {
        return row < rows ? visible(layer, sequence, item.row_block * most + row) : Span{0, 0};
    }
    HPC_DEVICE bool all_seen(int base) const { return base >= low && base + tile <= high; }

    // Returns the query token and head of a row.
    HPC_DEVICE int64_t token_of(int row) const {
        return sequence.first_row + (item.row_block * most + row) / layer.group;
    }
    HPC_DEVICE int head_of(int row) const { return (item.row_block * most + row) % layer.group; }
};

}  // namespace hpcdecode
