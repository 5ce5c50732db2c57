#include "blocks.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gguf_blocks.h"
#include "own_blocks.h"
#include "packed_weights.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

template <class Block, class = void>
constexpr int64_t kInputsOf = Block::kGroup;
template <class Block>
constexpr int64_t kInputsOf<Block, std::void_t<decltype(Block::kInputs)>> = Block::kInputs;

struct Work {
    const Blocks& weight;
    const float* bias;
    char* out;

    template <class Block>
    void panel(int64_t p) const {
        const int64_t inputs = weight.inputs, first = p * kPanel;
        char* to = out + p * (kPanel * 4 + 2 * half_bytes<Block>(inputs));
        const int64_t count = std::min<int64_t>(kPanel, weight.rows.size() - first);
        std::memcpy(to, bias + first, count * sizeof(float));
        for (int64_t r = 0; r < count; ++r) {
            char* scales = to + kPanel * 4 + r / kHalf * half_bytes<Block>(inputs);
            char* codes = scales + scale_bytes<Block>(inputs);
            const char* row = weight.rows[first + r];
            for (int64_t i = 0; i < inputs; i += kInputsOf<Block>, row += Block::kBytes)
                Block::pack(row, {scales + i / Block::kGroup * Block::kScaleBytes,
                                  codes + i / kBlockInputs * Block::kBlockBytes, static_cast<int>(r % kHalf),
                                  static_cast<int>(i % Block::kGroup)});
        }
    }

    void panel_of_type(int64_t p) const {
        switch (weight.type) {
            case BlockType::q4_0:
                return panel<Q40>(p);
            case BlockType::q4_1:
                return panel<Q41>(p);
            case BlockType::q5_0:
                return panel<Q50>(p);
            case BlockType::q8_0:
                return panel<Q80>(p);
            case BlockType::q4_k:
                return panel<Q4K>(p);
            case BlockType::q5_k:
                return panel<Q5K>(p);
            case BlockType::q6_k:
                return panel<Q6K>(p);
            case BlockType::nf4:
                return panel<Nf4>(p);
            case BlockType::nvfp4:
                return panel<Nvfp4>(p);
            case BlockType::i8:
                return panel<I8>(p);
            case BlockType::q2_k:
                return panel<Q2K>(p);
            case BlockType::q3_k:
                return panel<Q3K>(p);
            case BlockType::iq4_nl:
                return panel<Iq4Nl>(p);
            case BlockType::iq4_xs:
                return panel<Iq4Xs>(p);
            case BlockType::q5_1:
                return panel<Q51>(p);
            case BlockType::mxfp4:
                return panel<Mxfp4>(p);
            case BlockType::i4:
                return panel<I4>(p);
            case BlockType::f8:
                return panel<F8>(p);
            case BlockType::mx4:
                return panel<Mx4>(p);
            case BlockType::mx8:
                return panel<Mx8>(p);
        }
    }
};

}  // namespace

void pack_blocks(const Blocks& weight, const float* bias, char* out, int threads) {
    const Work work{weight, bias, out};
    run_shares(threads, panels_of(weight.rows.size()), [&](int64_t p) { work.panel_of_type(p); });
}

}  // namespace hpcdecode::ops
