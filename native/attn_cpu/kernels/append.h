// Writes new K and V rows into the cache, converting on the way. Included inside the namespace of one ISA.
template <class Store>
struct Append {
    // Scale of a row, as stored; 1 where the type has none.
    static inline uint16_t scale_of(const AppendArgs& a, const void* rows, int64_t at, int dims) {
        if constexpr (Store::kScaled) {
            float top = 0.0f;
            for (int d = 0; d < dims; ++d) {
                const float x = load_act(rows, a.type, at + d), size = x < 0 ? -x : x;
                top = size > top ? size : top;
            }
            return bf16_of(top / Store::kLevels);
        }
        return 0x3f80;
    }
    static inline float inverse(uint16_t scale) {
        const float x = float_of_bf16(scale);
        return x > 0.0f ? 1.0f / x : 0.0f;
    }

    static void tiled(const AppendArgs& a, int64_t i) {
        const HeadLayout& l = *a.kv.layout;
        const int64_t position = a.position + i, at = i * a.stride;
        const int in_block = static_cast<int>(position % l.block_tokens), tile = in_block / kTile,
                  lane = in_block % kTile;
        uint8_t* block = a.kv.base + a.kv.blocks[position / l.block_tokens] * a.kv.block_bytes;
        uint8_t* kt = block + k_tile_at<Store>(l, tile);
        uint8_t* vt = block + v_tile_at<Store>(l, tile);
        uint8_t* v_scales = block + v_scales_at<Store>(l, tile);
        // A recycled block may hold infinities, which a weight of zero would turn into NaN.
        if (lane == 0) {
            __builtin_memset(vt, 0, static_cast<size_t>(kTile / Store::kSteps) * l.v_pad / kTile * Store::kUnitBytes);
            if constexpr (Store::kScaled) __builtin_memset(v_scales, 0, kTile * 2);
        }
        const uint16_t k_scale = scale_of(a, a.k, at, l.k_dim), v_scale = scale_of(a, a.v, at, l.v_dim);
        if constexpr (Store::kScaled) {
            reinterpret_cast<uint16_t*>(block + k_scales_at<Store>(l, tile))[lane] = k_scale;
            reinterpret_cast<uint16_t*>(v_scales)[lane] = v_scale;
        }
        const float ki = inverse(k_scale), vi = inverse(v_scale);
        for (int d = 0; d < l.k_dim; ++d)
            Store::put(kt + d / Store::kSteps * l.k_step, lane, d % Store::kSteps, load_act(a.k, a.type, at + d) * ki);
        for (int d = 0; d < l.v_dim; ++d)
            Store::put(vt + v_unit_at<Store>(l, lane, d), d % kTile, lane % Store::kSteps,
                       load_act(a.v, a.type, at + d) * vi);
    }

    static void row(const AppendArgs& a, int64_t i) {
        const HeadLayout& l = *a.kv.layout;
        const int64_t position = a.position + i, at = i * a.stride;
        uint8_t* block = a.kv.base + a.kv.blocks[position / l.block_tokens] * a.kv.block_bytes;
        uint8_t* row = block + position % l.block_tokens * l.row_bytes;
        const uint16_t scales[2] = {scale_of(a, a.k, at, l.k_dim), scale_of(a, a.v, at, l.v_dim)};
        if constexpr (Store::kScaled) __builtin_memcpy(row + l.row_bytes - sizeof scales, scales, sizeof scales);
        const float ki = inverse(scales[0]), vi = inverse(scales[1]);
        for (int d = 0; d < l.k_dim; ++d) Store::put_row(row, d, load_act(a.k, a.type, at + d) * ki);
        for (int d = 0; d < l.v_dim; ++d) Store::put_row(row + l.k_row, d, load_act(a.v, a.type, at + d) * vi);
    }

    static void run(const AppendArgs& a) {
        const bool by_rows = a.kv.layout->tiles_per_block == 0;
        for (int64_t i = 0; i < a.count; ++i) by_rows ? row(a, i) : tiled(a, i);
    }

    // Gathers positions [begin, end) of one chunk, stored as rows, into four K tiles and four V tiles.
    static void gather(const HeadView& kv, int64_t begin, int64_t end, uint8_t* k_tiles, uint8_t* v_tiles) {
        const HeadLayout& l = *kv.layout;
        __builtin_memset(k_tiles, 0, kTilesPerChunk * l.k_tile);
        __builtin_memset(v_tiles, 0, kTilesPerChunk * l.v_tile);
        for (int64_t p = begin; p < end; ++p) {
            const int in_chunk = static_cast<int>(p % kChunk), lane = in_chunk % kTile;
            const uint8_t* row =
                kv.base + kv.blocks[p / l.block_tokens] * kv.block_bytes + p % l.block_tokens * l.row_bytes;
            uint8_t* kt = k_tiles + in_chunk / kTile * l.k_tile;
            uint8_t* vt = v_tiles + in_chunk / kTile * l.v_tile;
            for (int d = 0; d < l.k_dim; ++d)
                Store::move(row, d, kt + d / Store::kSteps * l.k_step, lane, d % Store::kSteps);
            for (int d = 0; d < l.v_dim; ++d)
                Store::move(row + l.k_row, d, vt + v_unit_at<Store>(l, lane, d), d % kTile, lane % Store::kSteps);
            if constexpr (Store::kScaled) {
                const uint8_t* scales = row + l.row_bytes - 4;
                __builtin_memcpy(kt + l.k_scales + lane * 2, scales, 2);
                __builtin_memcpy(vt + l.v_scales + lane * 2, scales + 2, 2);
            }
        }
    }
};
