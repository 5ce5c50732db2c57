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

    // K and V of one token, at its place in a run.
    static void into_run(const AppendArgs& a, int64_t i) {
        const HeadLayout& l = *a.kv.layout;
        const int64_t position = a.position + i, at = i * a.stride;
        const int in_block = static_cast<int>(position % l.block_tokens), token = in_block % l.run_tokens;
        uint8_t* run = a.kv.base + a.kv.blocks[position / l.block_tokens] * a.kv.block_bytes +
                       in_block / l.run_tokens * l.run_bytes;
        if (token % kTile == 0) clear_tile(l, run, token);
        const uint16_t k_scale = scale_of(a, a.k, at, l.k_dim), v_scale = scale_of(a, a.v, at, l.v_dim);
        if constexpr (Store::kScaled) {
            __builtin_memcpy(run + k_scales_at(l, token), &k_scale, 2);
            __builtin_memcpy(run + v_scales_at(l, token), &v_scale, 2);
        }
        const float ki = inverse(k_scale), vi = inverse(v_scale);
        for (int d = 0; d < l.k_dim; ++d)
            Store::put(run + k_unit_at<Store>(l, token, d), token % kTile, d % Store::kSteps,
                       load_act(a.k, a.type, at + d) * ki);
        for (int d = 0; d < l.v_dim; ++d)
            Store::put(run + v_unit_at<Store>(l, token, d), d % kTile, token % Store::kSteps,
                       load_act(a.v, a.type, at + d) * vi);
    }

    // A recycled block may hold infinities, which a weight of zero would turn into NaN.
    static void clear_tile(const HeadLayout& l, uint8_t* run, int token) {
        for (int d = 0; d < l.v_pad; d += kTile)
            for (int t = 0; t < kTile; t += Store::kSteps)
                __builtin_memset(run + v_unit_at<Store>(l, token + t, d), 0, Store::kUnitBytes);
        if constexpr (Store::kScaled) __builtin_memset(run + v_scales_at(l, token), 0, kTile * 2);
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
        for (int64_t i = 0; i < a.count; ++i) a.kv.layout->by_rows ? row(a, i) : into_run(a, i);
    }

    // Gathers positions [begin, end) of one chunk, stored as rows, into a run of 64.
    static void gather(const HeadView& kv, int64_t begin, int64_t end, uint8_t* run) {
        const HeadLayout& l = *kv.layout;
        __builtin_memset(run, 0, l.run_bytes);
        for (int64_t p = begin; p < end; ++p) {
            const int token = static_cast<int>(p % kChunk);
            const uint8_t* row =
                kv.base + kv.blocks[p / l.block_tokens] * kv.block_bytes + p % l.block_tokens * l.row_bytes;
            for (int d = 0; d < l.k_dim; ++d)
                Store::move(row, d, run + k_unit_at<Store>(l, token, d), token % kTile, d % Store::kSteps);
            for (int d = 0; d < l.v_dim; ++d)
                Store::move(row + l.k_row, d, run + v_unit_at<Store>(l, token, d), d % kTile, token % Store::kSteps);
            if constexpr (Store::kScaled) {
                const uint8_t* scales = row + l.row_bytes - 4;
                __builtin_memcpy(run + k_scales_at(l, token), scales, 2);
                __builtin_memcpy(run + v_scales_at(l, token), scales + 2, 2);
            }
        }
    }
};
