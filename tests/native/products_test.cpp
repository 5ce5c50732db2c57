// Multiplies rows by packed weights of every type and form on every kernel this machine has, and on emulated tiles, for
// the sanitizers to watch, against plain loops. A failed check prints where and what, and the exit status is 1.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "blocks.h"
#include "check.h"
#include "isa.h"
#include "packed_weights.h"
#include "product.h"
#include "quantise.h"
#include "rounding.h"

using namespace hpcdecode::ops;

namespace {

std::mt19937 random_bits(5);

uint16_t to_bf16(float x) {  // of numbers that it holds
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    return static_cast<uint16_t>(word >> 16);
}

float from_bf16(uint16_t x) {
    const uint32_t word = static_cast<uint32_t>(x) << 16;
    float made;
    std::memcpy(&made, &word, sizeof made);
    return made;
}

// Whole numbers, so that sums are exact, in whatever order.
struct Matrix {
    Matrix(int64_t rows, int64_t columns, int most) : rows(rows), columns(columns), values(rows * columns) {
        std::uniform_int_distribution<int> whole(-most, most);
        for (float& x : values) x = static_cast<float>(whole(random_bits));
    }
    const float* row(int64_t r) const { return values.data() + r * columns; }
    float at(int64_t r, int64_t c) const { return row(r)[c]; }

    // The numbers of a type, in rows of `row_bytes`.
    std::vector<char> as(Type type, int64_t row_bytes) const {
        std::vector<char> made(rows * row_bytes);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < columns; ++c) {
                char* const to = made.data() + r * row_bytes + c * kBytes[static_cast<int>(type)];
                const uint16_t half = to_bf16(at(r, c));
                if (type == Type::f32) std::memcpy(to, &values[r * columns + c], 4);
                if (type == Type::bf16) std::memcpy(to, &half, 2);
                if (type == Type::i8) *to = static_cast<char>(at(r, c));
            }
        return made;
    }

    int64_t rows, columns;
    std::vector<float> values;
};

struct Case {
    std::string isa;
    Type in, out;
    WeightForm form;
    int64_t inputs, outputs;
    std::optional<BlockType> blocks = {};  // that the weight comes in
    bool rounded = false;                  // rows are
};

constexpr uint16_t kOne = 0x3c00, kFour = 0x4400, kMinusFour = 0xc400;  // float16

void put(std::vector<char>& to, uint16_t half) {
    to.push_back(static_cast<char>(half)), to.push_back(static_cast<char>(half >> 8));
}

// Appends codes of 4 bits, of `count` inputs after `first`: those of the first half in lower bits.
void put_nibbles(std::vector<char>& to, const std::vector<int>& codes, int first, int count) {
    for (int i = first; i < first + count / 2; ++i)
        to.push_back(static_cast<char>((codes[i] & 15) | (codes[i + count / 2] & 15) << 4));
}

int fp4(int x) {
    constexpr int kSizes[] = {0, 2, 4, 5, 6};
    return (x < 0 ? 8 : 0) | kSizes[std::abs(x)];
}

// Appends a block of our own, or of MXFP4, of whole numbers from -4 to 4, and returns true; false if it is none.
bool put_own_block(std::vector<char>& to, BlockType type, const std::vector<int>& numbers) {
    if (type == BlockType::i8 || type == BlockType::nvfp4 || type == BlockType::f8) put(to, 0), put(to, to_bf16(1));
    if (type == BlockType::mxfp4 || type == BlockType::mx4 || type == BlockType::mx8) to.push_back(127);  // 2^0
    if (type == BlockType::i4) put(to, kOne), put(to, kFour);
    if (type == BlockType::nvfp4) to.insert(to.end(), 2, 0x38);  // 1 as FP8
    std::vector<int> codes;
    switch (type) {
        case BlockType::i8:
            to.insert(to.end(), numbers.begin(), numbers.end());
            return true;
        case BlockType::f8:
        case BlockType::mx8:
            for (const int x : numbers) to.push_back(static_cast<char>(to_fp8(static_cast<float>(x))));
            return true;
        case BlockType::mxfp4:
            for (const int x : numbers) codes.push_back(fp4(x));
            put_nibbles(to, codes, 0, 32);
            return true;
        case BlockType::i4:
        case BlockType::mx4:
        case BlockType::nvfp4:
            for (const int x : numbers) codes.push_back(type == BlockType::i4 ? x + 4 : fp4(x));
            for (int i = 0; i < 32; i += 2) to.push_back(static_cast<char>(codes[i] | codes[i + 1] << 4));
            return true;
        default:
            return false;
    }
}

// Appends a block of whole numbers from -4 to 4, as codes less 4 but in Q8_0 and Q6_K.
void put_block(std::vector<char>& to, BlockType type, const std::vector<int>& numbers) {
    std::vector<int> codes;
    for (const int x : numbers) codes.push_back(x + (type == BlockType::q6_k ? 32 : type == BlockType::q8_0 ? 0 : 4));
    if (put_own_block(to, type, numbers)) return;
    if (type != BlockType::q6_k) put(to, kOne);
    if (type == BlockType::q8_0) to.insert(to.end(), codes.begin(), codes.end());
    if (type == BlockType::q4_1 || type == BlockType::q5_1) {
        put(to, kMinusFour);
        if (type == BlockType::q5_1) to.insert(to.end(), 4, 0);  // fifth bits
        put_nibbles(to, codes, 0, 32);
    }
    if (type == BlockType::q4_k || type == BlockType::q5_k) {
        put(to, kOne);
        for (int i = 0; i < 12; ++i) to.push_back(static_cast<char>(i < 4 ? 1 : i < 8 ? 4 : 1 | 4 << 4));
        if (type == BlockType::q5_k) to.insert(to.end(), 32, 0);
        for (int first = 0; first < 256; first += 64) put_nibbles(to, codes, first, 64);
    }
    if (type != BlockType::q6_k) return;
    for (int first = 0; first < 256; first += 128) put_nibbles(to, codes, first, 128);
    for (int first = 0; first < 256; first += 128)
        for (int i = first; i < first + 32; ++i) {
            int high = 0;
            for (int quarter = 0; quarter < 4; ++quarter) high |= codes[i + 32 * quarter] >> 4 << (2 * quarter);
            to.push_back(static_cast<char>(high));
        }
    to.insert(to.end(), 16, 1);
    put(to, kOne);
}

std::vector<char> in_blocks(BlockType type, const Matrix& weight) {
    const auto each = static_cast<int64_t>(inputs_multiple(form_of(type)));
    std::vector<char> made;
    for (int64_t r = 0; r < weight.rows; ++r)
        for (int64_t first = 0; first < weight.columns; first += each) {
            std::vector<int> numbers;
            for (int64_t i = first; i < first + each; ++i) numbers.push_back(static_cast<int>(weight.at(r, i)));
            put_block(made, type, numbers);
        }
    return made;
}

std::vector<char> packed(const Case& c, const Product& product, const Matrix& weight, const std::vector<float>& bias) {
    std::vector<char> made(product.weight_bytes() + kLine);
    if (c.blocks) {
        const std::vector<char> rows = in_blocks(*c.blocks, weight);
        const int64_t bytes = static_cast<int64_t>(rows.size()) / weight.rows;
        pack_blocks({rows_of({{rows.data(), bytes, weight.rows}}, weight.rows), c.inputs, *c.blocks}, bias.data(),
                    made.data(), 1);
        return made;
    }
    const int64_t bytes = c.inputs * kBytes[static_cast<int>(c.in)];
    const std::vector<char> rows = weight.as(c.in, bytes);
    const std::vector<WeightRows> parts = {{rows.data(), bytes, weight.rows}};
    if (c.form != WeightForm::plain) {
        pack_few_bits({rows_of(parts, weight.rows), c.in, c.inputs, c.form}, bias.data(), made.data(), 1);
        return made;
    }
    std::vector<int32_t> more(c.outputs);  // for unsigned factors: -128 times the sums of weights
    for (int64_t o = 0; o < c.outputs; ++o)
        for (int64_t i = 0; i < c.inputs; ++i) more[o] -= 128 * static_cast<int32_t>(weight.at(o, i));
    const std::vector<float> scales(c.outputs, 0.5f);
    const auto words = [](const auto& numbers) { return reinterpret_cast<const uint32_t*>(numbers.data()); };
    const std::vector<const uint32_t*> of_int8 = {words(more), words(scales)}, of_floats = {words(bias)};
    pack_weights(parts, c.in == Type::i8 ? of_int8 : of_floats, bytes / 4, weight.rows,
                 reinterpret_cast<uint32_t*>(made.data()), 1);
    return made;
}

struct Results {
    int64_t columns;
    std::vector<char> data;
    Type type;

    float at(int64_t r, int64_t c) const {
        const char* from = data.data() + (r * columns + c) * kBytes[static_cast<int>(type)];
        float wide;
        uint16_t half;
        std::memcpy(&half, from, 2);
        if (type == Type::f32) std::memcpy(&wide, from, 4);
        return type == Type::f32 ? wide : from_bf16(half);
    }
};

Results multiplied(const Case& c, const Product& product, const std::vector<char>& x, int64_t x_bytes, int64_t rows,
                   std::vector<char>& weight, int members) {
    const int64_t bytes = c.outputs * kBytes[static_cast<int>(c.out)];
    Results made{c.outputs, std::vector<char>(rows * bytes), c.out};
    for (int m = 0; m < members; ++m)
        product.run(rows, {const_cast<char*>(x.data()), x_bytes}, {weight.data(), 0}, {made.data.data(), bytes}, m,
                    members, nullptr, nullptr);
    return made;
}

void test_case(const Case& c) {
    const Form form{c.form, c.rounded};
    if (!Product::offered(c.in, c.out, c.isa, {}, form)) return;
    const Product product(c.in, c.out, c.inputs * kBytes[static_cast<int>(c.in)] / 4, c.outputs, c.isa, {}, form);
    const Matrix weight(c.outputs, c.inputs, 4);
    std::vector<float> bias(c.outputs);
    for (int64_t o = 0; o < c.outputs; ++o) bias[o] = static_cast<float>(o % 7);
    std::vector<char> panels = packed(c, product, weight, bias);
    const bool exact = !c.rounded && (c.form == WeightForm::plain || c.blocks);
    for (const int64_t rows : {1, 5, 16, 17, 33, 129, 300}) {
        const Matrix x(rows, c.inputs, 4);
        const int64_t x_bytes = product.x_bytes() + 64;
        const std::vector<char> given = x.as(c.in, x_bytes);
        const Results y = multiplied(c, product, given, x_bytes, rows, panels, 1 + static_cast<int>(rows % 3));
        double off = 0, size = 0;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t o = 0; o < c.outputs; ++o) {
                const float *const row = x.row(r), *const end = row + c.inputs;
                float sum = std::inner_product(row, end, weight.row(o), c.in == Type::i8 ? 0.0f : bias[o]);
                if (c.in == Type::i8) sum *= 0.5f;
                off += std::pow(y.at(r, o) - sum, 2), size += std::pow(sum, 2);
            }
        const double error = std::sqrt(off / size), most = exact && c.out == Type::f32 ? 0 : exact ? 0.003 : 0.1;
        CHECK(error <= most, "%s, types %d and %d, form %d, %ld inputs, %ld rows: off by %g", c.isa.c_str(),
              static_cast<int>(c.in), static_cast<int>(c.out), static_cast<int>(c.form), static_cast<long>(c.inputs),
              static_cast<long>(rows), error);
        const int64_t row = rows * 2 / 3;  // alone it has the same bits
        const std::vector<char> one(given.begin() + row * x_bytes, given.begin() + (row + 1) * x_bytes);
        const Results alone = multiplied(c, product, one, x_bytes, 1, panels, 1);
        CHECK(std::equal(alone.data.begin(), alone.data.end(), y.data.begin() + row * alone.data.size()),
              "%s, form %d, row %ld of %ld alone", c.isa.c_str(), static_cast<int>(c.form), static_cast<long>(row),
              static_cast<long>(rows));
    }
}

}  // namespace

int main() {
    for (const std::string& isa : hpcdecode::supported_isas()) {
        for (const int64_t outputs : {31, 96})
            for (const int64_t inputs : {8, 40, 576}) {
                test_case({isa, Type::f32, Type::f32, WeightForm::plain, inputs, outputs});
                test_case({isa, Type::bf16, Type::bf16, WeightForm::plain, inputs, outputs});
                test_case({isa, Type::i8, Type::f32, WeightForm::plain, inputs, outputs});
                test_case({isa, Type::i8, Type::bf16, WeightForm::plain, inputs, outputs});
            }
        for (const WeightForm form : {WeightForm::int4, WeightForm::mxfp4, WeightForm::mxfp8, WeightForm::fp8})
            for (const int64_t inputs : {32, 608}) {
                for (const bool rounded : {false, true}) {
                    test_case({isa, Type::f32, Type::f32, form, inputs, 70, {}, rounded});
                    test_case({isa, Type::bf16, Type::bf16, form, inputs, 70, {}, rounded});
                }
            }
        for (const BlockType blocks : {BlockType::q4_1, BlockType::q5_1, BlockType::q8_0, BlockType::q4_k,
                                       BlockType::q5_k, BlockType::q6_k, BlockType::nvfp4, BlockType::i8, BlockType::i4,
                                       BlockType::mxfp4, BlockType::mx4, BlockType::mx8, BlockType::f8}) {
            for (const bool rounded : {false, true}) {
                test_case({isa, Type::f32, Type::f32, form_of(blocks), 512, 70, blocks, rounded});
                test_case({isa, Type::bf16, Type::bf16, form_of(blocks), 512, 70, blocks, rounded});
            }
        }
    }
    return report("products_test");
}
