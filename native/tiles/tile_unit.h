// The tile registers of AMX, numbered as TileUnit's verbs shape them, or the same in plain C++ where
// HPCDECODE_EMULATE_TILES is defined, for machines without AMX.
//
// A tile product is C[m][n] += A[m][k] * B[k][n]. Rows of A and columns of B hold pairs (bfloat16) or quads (bytes)
// along k.
//
// tile_load_once: As tile_load, of memory that need not stay in the first cache.
//
// configure: Tiles 0 to 3 are C, `rows` x 16 words. Tile 4 is A, `rows` x 16 words; tile 5 is B, 16 x 16 words. Tiles 6
// and 7 are halves of A, with 8 words a row, and of B, with 8 rows.
// configure_gemm: Tiles 0 to 3 are C, `rows` x 16 words. Tiles 4 and 5 are A, `rows` x `words`. Tiles 6 and 7 are B,
// `words` x 16 words.
#pragma once
#ifdef HPCDECODE_EMULATE_TILES
#include "emulated_unit.h"
#else
#include "amx_unit.h"
#endif
