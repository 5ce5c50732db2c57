// How each KV type lies in a tile, and how it becomes float vectors. Included inside the namespace of one ISA.
//
// A unit is two steps of 16 lanes. K tile: [k_pad/2] units, lane = token, steps = two dims.
// V tile: [8][v_pad/16] units, lane = dim, steps = two tokens. 32-bit and half: [2 steps][16 lanes];
// bfloat16: [16 lanes][2 steps], the operand order of a bf16 pair product.
struct StoreF32 {
    using Elem = float;
    static constexpr int kUnitBytes = 128;
    static int offset(int lane, int step) { return step * kTile + lane; }
    static Elem encode(float x) { return x; }
    static inline void load(const uint8_t* unit, int j, F& a, F& b) {
        const float* p = reinterpret_cast<const float*>(unit) + j * W;
        a = vload(p);
        b = vload(p + kTile);
    }
};

struct StoreF16 {
    using Elem = uint16_t;
    static constexpr int kUnitBytes = 64;
    static int offset(int lane, int step) { return step * kTile + lane; }
    static Elem encode(float x) { return f16_of(x); }
    static inline void load(const uint8_t* unit, int j, F& a, F& b) {
        const uint16_t* p = reinterpret_cast<const uint16_t*>(unit) + j * W;
        a = load_f16(p);
        b = load_f16(p + kTile);
    }
};

struct StoreBF16 {
    using Elem = uint16_t;
    static constexpr int kUnitBytes = 64;
    static int offset(int lane, int step) { return lane * 2 + step; }
    static Elem encode(float x) { return bf16_of(x); }
    static inline void load(const uint8_t* unit, int j, F& a, F& b) {
        load_bf16_pairs(reinterpret_cast<const uint16_t*>(unit) + j * W * 2, a, b);
    }
};

inline size_t v_unit(const HeadLayout& l, int token, int dim) { return token / 2 * (l.v_pad / kTile) + dim / kTile; }

// First unit of K tile `tile` of a block.
template <class Store>
inline size_t k_tile_at(const HeadLayout& l, uint32_t tile) {
    if (l.k_step == Store::kUnitBytes) return tile * l.k_tile;
    return tile / kTilesPerChunk * kTilesPerChunk * l.k_tile + tile % kTilesPerChunk * Store::kUnitBytes;
}
