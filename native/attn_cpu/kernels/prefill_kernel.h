// Causal attention of prompts, tile by tile with a running softmax (FlashAttention; Dao et al. 2022, algorithm 1).
// Tiles begin at multiples of kPromptTile of the prompt, and no value of a row enters another's: how a prompt is cut
// into calls and what it is batched with changes no bit of the result. Included inside the namespace of one ISA.
template <class Words>
struct Prefill {
    using Word = typename Words::Word;
    using Element = typename Words::Element;
    static constexpr int kSteps = Words::kElements;
    static constexpr int kVecsPerTile = kPromptTile / W;
    static constexpr float kSlack = 8.0f;  // weights grow to 2^kSlack before the reference exponent follows

    static constexpr PromptKernel kernel() { return {kSteps, pack, attend}; }

    static void pack(const PromptPackArgs& a) {
        const PromptLayout& l = *a.layout;
        for (int64_t i = 0; i < a.count; ++i) {
            const int64_t position = a.position + i;
            const int lane = static_cast<int>(position % kPromptTile);
            Word* tile = reinterpret_cast<Word*>(a.tiles) + position / kPromptTile * l.tile_stride;
            Word* values = tile + l.v_offset;
            // Positions that are yet to come have weight zero, which NaN would not survive.
            if (lane == 0) __builtin_memset(values, 0, (l.tile_words - l.v_offset) * sizeof(Word));
            Element* k = reinterpret_cast<Element*>(tile + lane);
            for (int d = 0; d < l.k_words * kSteps; ++d)
                k[d / kSteps * kPromptTile * kSteps + d % kSteps] =
                    d < l.k_dim ? Words::load(a.k, a.type, i * a.k_stride + d) : Element{};
            Element* v = reinterpret_cast<Element*>(values + lane / kSteps * l.v_pad) + lane % kSteps;
            for (int d = 0; d < l.v_dim; ++d) v[d * kSteps] = Words::load(a.v, a.type, i * a.v_stride + d);
        }
    }

    // What an item keeps of its rows, padded to whole passes.
    struct Rows {
        int count, padded;
        Word* q;        // [padded][k_words]
        float* o;       // [padded][v_pad]
        float* m;       // [padded] reference exponents
        float* sums;    // [padded][W] partial sums of weights
        float* scores;  // [kPromptRows][kPromptTile]
        Word* weights;  // [kPromptRows][kPromptTile / kSteps]
    };

    static Rows carve(const PromptAttendArgs& a) {
        const PromptLayout& l = *a.layout;
        Rows w;
        w.count = static_cast<int>(a.count) * a.group;
        w.padded = (w.count + kPromptRows - 1) / kPromptRows * kPromptRows;
        uint8_t* at = a.scratch;
        const auto take = [&](int64_t words) {
            uint8_t* p = at;
            at += (words * 4 + 63) / 64 * 64;
            return p;
        };
        w.q = reinterpret_cast<Word*>(take(int64_t{w.padded} * l.k_words));
        w.o = reinterpret_cast<float*>(take(int64_t{w.padded} * l.v_pad));
        w.m = reinterpret_cast<float*>(take(w.padded));
        w.sums = reinterpret_cast<float*>(take(int64_t{w.padded} * W));
        w.scores = reinterpret_cast<float*>(take(kPromptRows * kPromptTile));
        w.weights = reinterpret_cast<Word*>(take(kPromptRows * kPromptTile));
        return w;
    }

    static void prepare(const PromptAttendArgs& a, const Rows& w) {
        const PromptLayout& l = *a.layout;
        for (int r = 0; r < w.padded; ++r) {
            uint8_t* q = reinterpret_cast<uint8_t*>(w.q + int64_t{r} * l.k_words);
            const int64_t from = r / a.group * a.q_stride + static_cast<int64_t>(r % a.group) * l.k_dim;
            for (int d = 0; d < l.k_words * kSteps; ++d, q += sizeof(Element)) {
                const Element x = r < w.count && d < l.k_dim ? Words::load(a.q, a.type, from + d) : Element{};
                __builtin_memcpy(q, &x, sizeof x);
            }
            w.m[r] = -__builtin_inff();
        }
        __builtin_memset(w.o, 0, sizeof(float) * w.padded * l.v_pad);
        __builtin_memset(w.sums, 0, sizeof(float) * w.padded * W);
    }

    // Scores of one row become weights; lanes outside [lo, hi) weigh nothing.
    static inline void weigh(const PromptAttendArgs& a, const float* scores, int64_t lo, int64_t hi, float& m,
                             float* sums, float* o, Word* weights) {
        F x[kVecsPerTile];
        for (int t = 0; t < kVecsPerTile; ++t) x[t] = vmul(vload(scores + t * W), vset(a.scale));
        if (a.softcap > 0)
            for (F& s : x) s = vsoftcap(s, a.softcap);
        for (F& s : x) s = vmul(s, vset(kLog2E));
        if (lo > 0 || hi < kPromptTile)
            for (int t = 0; t < kVecsPerTile; ++t)
                x[t] = keep_lanes(x[t], static_cast<int>(lo) - t * W, static_cast<int>(hi) - t * W);
        F top = x[0];
        for (int t = 1; t < kVecsPerTile; ++t) top = vmax(top, x[t]);
        if (any_greater(top, m + kSlack)) {
            const float raised = hmax(top);
            rescale(exp2_one(m - raised), a.layout->v_pad, sums, o);
            m = raised;
        }
        const F reference = vset(m == -__builtin_inff() ? 0.0f : m);
        for (F& s : x) s = Words::exp2(vsub(s, reference));
        Words::emit(x, sums, weights);
    }

    static __attribute__((noinline)) void rescale(float factor, int v_pad, float* sums, float* o) {
        const F f = vset(factor);
        vstore(sums, vmul(vload(sums), f));
        for (int d = 0; d < v_pad; d += W) vstore(o + d, vmul(vload(o + d), f));
    }

    // One pass of rows against one tile.
    static void attend_tile(const PromptAttendArgs& a, const Rows& w, int row, int64_t tile) {
        const PromptLayout& l = *a.layout;
        const int64_t base = tile * kPromptTile;
        const auto seen = [&](int r) {  // positions of the tile that row r sees end here
            const int last = r < w.count ? r : w.count - 1;
            return a.position + last / a.group + 1 - base;
        };
        const int64_t most = seen(row + kPromptRows - 1);
        if (most <= 0 || (a.window > 0 && seen(row) - a.window >= kPromptTile)) return;
        const int keys = most < kPromptTile ? static_cast<int>(most) : kPromptTile;
        const Word* k = reinterpret_cast<const Word*>(a.tiles) + tile * l.tile_stride;
        multiply<Words, false>(w.q + int64_t{row} * l.k_words, l.k_words, k, kPromptTile, l.k_words, w.scores,
                               kPromptTile, (keys + W - 1) / W);
        constexpr int kWeights = kPromptTile / kSteps;
        for (int r = 0; r < kPromptRows; ++r) {
            const int64_t hi = seen(row + r), lo = a.window > 0 ? hi - a.window : 0;
            weigh(a, w.scores + r * kPromptTile, lo, hi, w.m[row + r], w.sums + (row + r) * W,
                  w.o + int64_t{row + r} * l.v_pad, w.weights + r * kWeights);
        }
        multiply<Words, true>(w.weights, kWeights, k + l.v_offset, l.v_pad, (keys + kSteps - 1) / kSteps,
                              w.o + int64_t{row} * l.v_pad, l.v_pad, l.v_pad / W);
    }

    static void write(const PromptAttendArgs& a, const Rows& w, int r) {
        const PromptLayout& l = *a.layout;
        float total = hsum(vload(w.sums + r * W)), share = 1.0f;
        if (a.sinks != nullptr) {
            const float sink = a.sinks[r % a.group] * kLog2E, top = sink > w.m[r] ? sink : w.m[r];
            share = exp2_one(w.m[r] - top);
            total = total * share + exp2_one(sink - top);
        }
        const float* o = w.o + int64_t{r} * l.v_pad;
        const int64_t at = r / a.group * a.out_stride + static_cast<int64_t>(r % a.group) * l.v_dim;
        const F f = vset(share / total);
        int d = 0;
        for (; d + W <= l.v_dim; d += W) {
            const F x = vmul(vload(o + d), f);
            if (a.type == ActType::kF32) {
                vstore(static_cast<float*>(a.out) + at + d, x);
            } else {
                store_bf16(static_cast<uint16_t*>(a.out) + at + d, x);
            }
        }
        for (; d < l.v_dim; ++d) store_act(a.out, a.type, at + d, o[d] * (share / total));
    }

    static void attend(const PromptAttendArgs& a) {
        const Rows w = carve(a);
        prepare(a, w);
        const int64_t first = a.window > 0 && a.position >= a.window ? (a.position - a.window + 1) / kPromptTile : 0;
        for (int64_t tile = first; tile * kPromptTile < a.position + a.count; ++tile)
            for (int row = 0; row < w.padded; row += kPromptRows) attend_tile(a, w, row, tile);
        for (int r = 0; r < w.count; ++r) write(a, w, r);
    }
};
