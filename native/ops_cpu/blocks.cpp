#include "blocks.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "code_layout.h"
#include "product.h"
#include "team.h"

namespace hpcdecode::ops {
namespace {

constexpr int kHalf = kPanel / 2;
constexpr uint16_t kEight = 0x4800;  // 8 as float16

uint8_t byte(const char* p, int64_t i) { return static_cast<uint8_t>(p[i]); }

// Where the scales of a group, and the codes of a block's inputs, of one output lie.
struct Place {
    char *scales, *codes;
    int output;
    int first;  // the block's first input in its group

    void number(float value) const { std::memcpy(scales + output * 4, &value, sizeof value); }

    void half(int row, const char* from) const { std::memcpy(scales + (row * kHalf + output) * 2, from, 2); }
    void byte_at(int64_t row, uint8_t value) const { scales[row + output] = static_cast<char>(value); }
    template <class Layout>
    void code(uint8_t code, int input) const {
        char* block = codes + input / kBlockInputs * Layout::kBlockBytes;
        const int own = input % static_cast<int>(kBlockInputs);
        if constexpr (Layout::kBlockBytes == Int4Layout::kBlockBytes)
            store_nibble(code, own, output, block);
        else
            store_byte(code, own, output, block);
    }
};

float float_at(const char* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Each of these packs one block: a group of the form that it becomes, or kInputs of one.
// Sources of those of GGUF: ggml-quants.c and ggml-common.h of ggml.
struct Q40 : Int4Layout {
    static constexpr int64_t kBytes = 18;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, reinterpret_cast<const char*>(&kEight));
        for (int i = 0; i < 32; ++i) to.code<Q40>(byte(from, 2 + i % 16) >> (i / 16 * 4) & 15, i);
    }
};

struct Q41 : Q41Layout {
    static constexpr int64_t kBytes = 20;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        for (int i = 0; i < 32; ++i) to.code<Q41>(byte(from, 4 + i % 16) >> (i / 16 * 4) & 15, i);
    }
};

// Code i, of 5 bits: a fifth bit of each of 32 codes, then the others.
int five_bits(const char* from, int i) {
    return (byte(from, 4 + i % 16) >> (i / 16 * 4) & 15) | (byte(from, i / 8) >> (i % 8) & 1) << 4;
}

struct Q50 : Q80Layout {
    static constexpr int64_t kBytes = 22;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 32; ++i) to.code<Q50>(static_cast<uint8_t>(five_bits(from + 2, i) - 16), i);
    }
};

struct Q51 : Q51Layout {
    static constexpr int64_t kBytes = 24;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        to.half(1, from + 2);
        for (int i = 0; i < 32; ++i) to.code<Q51>(static_cast<uint8_t>(five_bits(from + 4, i)), i);
    }
};

struct Q80 : Q80Layout {
    static constexpr int64_t kBytes = 34;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 32; ++i) to.code<Q80>(byte(from, 2 + i), i);
    }
};

// Puts what a block of 256 inputs begins with: two float16, then 8 scales and 8 leasts of 6 bits in 12 bytes.
void put_levels(const char* from, const Place& to) {
    to.half(0, from);
    to.half(1, from + 2);
    const char* q = from + 4;
    for (int i = 0; i < 8; ++i) {
        const int scale = i < 4 ? byte(q, i) & 63 : (byte(q, i + 4) & 15) | byte(q, i - 4) >> 6 << 4;
        const int least = i < 4 ? byte(q, i + 4) & 63 : byte(q, i + 4) >> 4 | byte(q, i) >> 6 << 4;
        to.byte_at((4 + 2 * i) * kHalf, static_cast<uint8_t>(scale));
        to.byte_at((5 + 2 * i) * kHalf, static_cast<uint8_t>(least));
    }
}

struct Q4K : Q4KLayout {
    static constexpr int64_t kBytes = 144;
    static void pack(const char* from, const Place& to) {
        put_levels(from, to);
        for (int i = 0; i < 256; ++i) to.code<Q4K>(byte(from, 16 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4) & 15, i);
    }
};

struct Q5K : Q5KLayout {
    static constexpr int64_t kBytes = 176;
    static void pack(const char* from, const Place& to) {
        put_levels(from, to);
        for (int i = 0; i < 256; ++i) {
            const int low = byte(from, 48 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4) & 15;
            to.code<Q5K>(static_cast<uint8_t>(low | (byte(from, 16 + i % 32) >> (i / 32) & 1) << 4), i);
        }
    }
};

struct Q6K : Q6KLayout {
    static constexpr int64_t kBytes = 210;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 208);
        for (int i = 0; i < 16; ++i) to.byte_at((2 + i) * kHalf, byte(from, 192 + i));
        for (int i = 0; i < 256; ++i) {
            const int half = i / 128, quarter = i / 32 % 4;
            const int low = byte(from, half * 64 + quarter % 2 * 32 + i % 32) >> (quarter / 2 * 4) & 15;
            const int high = byte(from, 128 + half * 32 + i % 32) >> (quarter * 2) & 3;
            to.code<Q6K>(static_cast<uint8_t>((low | high << 4) - 32), i);
        }
    }
};

struct Q2K : Q2KLayout {
    static constexpr int64_t kBytes = 84;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 80);
        to.half(1, from + 82);
        for (int i = 0; i < 16; ++i) {
            to.byte_at((4 + 2 * i) * kHalf, byte(from, i) & 15);
            to.byte_at((5 + 2 * i) * kHalf, byte(from, i) >> 4);
        }
        for (int i = 0; i < 256; ++i) to.code<Q2K>(byte(from, 16 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3, i);
    }
};

struct Q3K : Q3KLayout {
    static constexpr int64_t kBytes = 110;
    static void pack(const char* from, const Place& to) {
        to.half(0, from + 108);
        const char* q = from + 96;
        for (int i = 0; i < 16; ++i) {
            const int low = byte(q, i % 8) >> (i / 8 * 4) & 15, high = byte(q, 8 + i % 4) >> (i / 4 * 2) & 3;
            to.byte_at((2 + i) * kHalf, static_cast<uint8_t>((low | high << 4) - 32));
        }
        for (int i = 0; i < 256; ++i) {
            const int low = byte(from, 32 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3;
            to.code<Q3K>(static_cast<uint8_t>(low | (byte(from, i % 32) >> (i / 32) & 1) << 2), i);
        }
    }
};

struct Iq4Nl : Iq4NlLayout {
    static constexpr int64_t kBytes = 18;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 32; ++i) to.code<Iq4Nl>(byte(from, 2 + i % 16) >> (i / 16 * 4) & 15, i);
    }
};

struct Iq4Xs : Iq4XsLayout {
    static constexpr int64_t kBytes = 136;
    static void pack(const char* from, const Place& to) {
        to.half(0, from);
        for (int i = 0; i < 16; ++i) {
            const int block = i / 2, low = byte(from, 4 + block / 2) >> (block % 2 * 4) & 15;
            const int high = byte(from, 2 + block / 4) >> (block % 4 * 2) & 3;
            to.byte_at((2 + i) * kHalf, static_cast<uint8_t>((low | high << 4) - 32));
        }
        for (int i = 0; i < 256; ++i) to.code<Iq4Xs>(byte(from, 8 + i / 32 * 16 + i % 16) >> (i / 16 % 2 * 4) & 15, i);
    }
};

struct Nf4 : Nf4Layout {
    static constexpr int64_t kBytes = 36;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from));
        for (int i = 0; i < 64; ++i) to.code<Nf4>(byte(from, 4 + i / 2) >> (i % 2 == 0 ? 4 : 0) & 15, i);
    }
};

struct Nvfp4 : Nvfp4Layout {
    static constexpr int64_t kBytes = 22, kInputs = 32;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from) * 256);
        for (int i = 0; i < 2; ++i) to.byte_at((4 + to.first / 16 + i) * kHalf, byte(from, 4 + i));
        for (int i = 0; i < 32; ++i) to.code<Nvfp4>(byte(from, 6 + i / 2) >> (i % 2 * 4) & 15, i);
    }
};

struct I8 : I8Layout {
    static constexpr int64_t kBytes = 36, kInputs = 32;
    static void pack(const char* from, const Place& to) {
        to.number(float_at(from));
        for (int i = 0; i < 32; ++i) to.code<I8>(byte(from, 4 + i), i);
    }
};

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
        }
    }
};

}  // namespace

void pack_blocks(const Blocks& weight, const float* bias, char* out, int threads) {
    Work work{weight, bias, out};
    const auto pack = [](void* data, int member, int members) {
        const Work& w = *static_cast<const Work*>(data);
        const int64_t panels = (static_cast<int64_t>(w.weight.rows.size()) + kPanel - 1) / kPanel;
        for (int64_t p = share(panels, member, members); p < share(panels, member + 1, members); ++p)
            w.panel_of_type(p);
    };
    run_team(threads, threads, pack, &work);
}

}  // namespace hpcdecode::ops
