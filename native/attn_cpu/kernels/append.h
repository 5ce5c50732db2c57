// Writes new K and V rows into the cache, converting on the way. Included inside the namespace of one ISA.
template <class Store>
struct Append {
    using Elem = typename Store::Elem;

    static inline Elem take(const AppendArgs& a, const void* rows, int64_t i) {
        return Store::encode(load_act(rows, a.type, i));
    }

    static void tiled(const AppendArgs& a, int64_t i) {
        const HeadLayout& l = *a.kv.layout;
        const int64_t position = a.position + i;
        const int in_block = static_cast<int>(position % l.block_tokens), tile = in_block / kTile, lane = in_block % kTile;
        uint8_t* block = a.kv.base + a.kv.blocks[position / l.block_tokens] * a.kv.block_bytes;
        uint8_t* kt = block + k_tile_at<Store>(l, tile);
        uint8_t* vt = block + l.v_offset + tile * l.v_tile;
        // A recycled block may hold infinities, which a weight of zero would turn into NaN.
        if (lane == 0) __builtin_memset(vt, 0, l.v_tile);
        for (int d = 0; d < l.k_dim; ++d)
            reinterpret_cast<Elem*>(kt + d / 2 * l.k_step)[Store::offset(lane, d % 2)] = take(a, a.k, i * a.stride + d);
        for (int d = 0; d < l.v_dim; ++d)
            reinterpret_cast<Elem*>(vt)[v_unit(l, lane, d) * 2 * kTile + Store::offset(d % kTile, lane % 2)] =
                take(a, a.v, i * a.stride + d);
    }

    static void row(const AppendArgs& a, int64_t i) {
        const HeadLayout& l = *a.kv.layout;
        const int64_t position = a.position + i;
        uint8_t* block = a.kv.base + a.kv.blocks[position / l.block_tokens] * a.kv.block_bytes;
        uint8_t* row = block + position % l.block_tokens * l.row_bytes;
        Elem* k = reinterpret_cast<Elem*>(row);
        Elem* v = reinterpret_cast<Elem*>(row + l.k_row);
        for (int d = 0; d < l.k_dim; ++d) k[d] = take(a, a.k, i * a.stride + d);
        for (int d = 0; d < l.v_dim; ++d) v[d] = take(a, a.v, i * a.stride + d);
    }

    static void run(const AppendArgs& a) {
        const bool by_rows = a.kv.layout->tiles_per_block == 0;
        for (int64_t i = 0; i < a.count; ++i) by_rows ? row(a, i) : tiled(a, i);
    }

    // Gathers positions [begin, end) of one chunk, stored as rows, into four K tiles and four V tiles.
    static void gather(const HeadView& kv, int64_t begin, int64_t end, uint8_t* k_tiles, uint8_t* v_tiles) {
        const HeadLayout& l = *kv.layout;
        __builtin_memset(v_tiles, 0, kTilesPerChunk * l.v_tile);
        for (int64_t p = begin; p < end; ++p) {
            const int in_chunk = static_cast<int>(p % kChunk), lane = in_chunk % kTile;
            const uint8_t* row = kv.base + kv.blocks[p / l.block_tokens] * kv.block_bytes + p % l.block_tokens * l.row_bytes;
            const Elem* k = reinterpret_cast<const Elem*>(row);
            const Elem* v = reinterpret_cast<const Elem*>(row + l.k_row);
            Elem* kt = reinterpret_cast<Elem*>(k_tiles + in_chunk / kTile * l.k_tile);
            Elem* vt = reinterpret_cast<Elem*>(v_tiles + in_chunk / kTile * l.v_tile);
            for (int d = 0; d < l.k_pad; ++d) kt[d / 2 * 2 * kTile + Store::offset(lane, d % 2)] = k[d];
            for (int d = 0; d < l.v_pad; ++d)
                vt[v_unit(l, lane, d) * 2 * kTile + Store::offset(d % kTile, lane % 2)] = v[d];
        }
    }
};
