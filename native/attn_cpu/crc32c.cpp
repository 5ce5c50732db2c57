#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace hpcdecode {
namespace {

constexpr uint32_t kReversed = 0x82f63b78;

// Tables for eight bytes at once: tables[i][b] is the checksum of byte b with i bytes of zeros behind it.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables make_tables() {
    Tables tables{};
    for (uint32_t b = 0; b < 256; ++b) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kReversed : 0);
        tables[0][b] = crc;
    }
    for (int i = 1; i < 8; ++i)
        for (uint32_t b = 0; b < 256; ++b) tables[i][b] = (tables[i - 1][b] >> 8) ^ tables[0][tables[i - 1][b] & 0xff];
    return tables;
}

#if defined(__x86_64__)
constexpr size_t kPart = 2048;  // bytes

// What kPart zeros make of a state, by its bytes: states are linear.
using Shifts = std::array<std::array<uint32_t, 256>, 4>;

Shifts make_shifts() {
    const uint8_t zeros[kPart] = {};
    Shifts shifts{};
    for (int i = 0; i < 4; ++i)
        for (uint32_t b = 0; b < 256; ++b) shifts[i][b] = ~crc32c_by_table(zeros, kPart, ~(b << 8 * i));
    return shifts;
}

uint64_t after_part(uint64_t state) {
    static const Shifts shifts = make_shifts();
    return shifts[0][state & 0xff] ^ shifts[1][state >> 8 & 0xff] ^ shifts[2][state >> 16 & 0xff] ^
           shifts[3][state >> 24 & 0xff];
}

// Takes three streams of `words` eight bytes further. An instruction takes three cycles, and one can begin in each.
__attribute__((target("sse4.2"))) void three_streams(const uint8_t* const* data, size_t words, uint64_t* state) {
    uint64_t s[3] = {state[0], state[1], state[2]};
    for (size_t i = 0; i < words; ++i) {
        uint64_t word[3];
        for (int j = 0; j < 3; ++j) std::memcpy(&word[j], data[j] + i * 8, 8);
        for (int j = 0; j < 3; ++j) s[j] = _mm_crc32_u64(s[j], word[j]);
    }
    for (int j = 0; j < 3; ++j) state[j] = s[j];
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* data, size_t size, uint32_t crc) {
    uint64_t state = static_cast<uint32_t>(~crc);
    for (; size >= 3 * kPart; data += 3 * kPart, size -= 3 * kPart) {
        const uint8_t* const parts[3] = {data, data + kPart, data + 2 * kPart};
        uint64_t states[3] = {state, 0, 0};
        three_streams(parts, kPart / 8, states);
        state = after_part(after_part(states[0]) ^ states[1]) ^ states[2];
    }
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        state = _mm_crc32_u64(state, word);
    }
    uint32_t last = static_cast<uint32_t>(state);
    for (; size > 0; ++data, --size) last = _mm_crc32_u8(last, *data);
    return ~last;
}

void three_by_instruction(const uint8_t* const* data, size_t size, uint32_t* sums) {
    uint64_t state[3] = {~uint32_t{0}, ~uint32_t{0}, ~uint32_t{0}};
    const size_t words = size / 8;
    three_streams(data, words, state);
    for (int j = 0; j < 3; ++j)
        sums[j] = by_instruction(data[j] + words * 8, size % 8, ~static_cast<uint32_t>(state[j]));
}

bool has_instruction() {
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
}
#endif

}  // namespace

uint32_t crc32c_by_table(const uint8_t* data, size_t size, uint32_t crc) {
    static const Tables tables = make_tables();
    uint32_t state = ~crc;
    for (; size >= 8; data += 8, size -= 8) {
        const uint32_t low = state ^ (data[0] | data[1] << 8 | data[2] << 16 | uint32_t{data[3]} << 24);
        state = tables[7][low & 0xff] ^ tables[6][low >> 8 & 0xff] ^ tables[5][low >> 16 & 0xff] ^ tables[4][low >> 24];
        state ^= tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
    }
    for (; size > 0; ++data, --size) state = (state >> 8) ^ tables[0][(state ^ *data) & 0xff];
    return ~state;
}

uint32_t crc32c(const uint8_t* data, size_t size, uint32_t crc) {
#if defined(__x86_64__)
    if (has_instruction()) return by_instruction(data, size, crc);
#endif
    return crc32c_by_table(data, size, crc);
}

void crc32c_each(const uint8_t* const* data, size_t size, int n, uint32_t* sums) {
    int i = 0;
#if defined(__x86_64__)
    for (; has_instruction() && i + 3 <= n; i += 3) three_by_instruction(data + i, size, sums + i);
#endif
    for (; i < n; ++i) sums[i] = crc32c(data[i], size);
}

}  // namespace hpcdecode
