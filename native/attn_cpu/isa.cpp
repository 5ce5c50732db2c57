#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hpcdecode {

namespace isa_generic {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const KernelTable table;
}
namespace isa_avx512 {
extern const KernelTable table;
}
namespace isa_avx512_bf16 {
extern const KernelTable table;
}
namespace isa_amx {
extern const KernelTable table;
}
#ifdef HPCDECODE_EMULATED_TILES
namespace isa_amx_emulated {
extern const KernelTable table;
}
#endif
#elif defined(__aarch64__)
namespace isa_neon {
extern const KernelTable table;
}
#endif

namespace {

struct Entry {
    const KernelTable* table;
    bool (*supported)();
    bool proven;  // the project's tests have run on such a machine, not only under an emulator
};

bool always() { return true; }

#if defined(__x86_64__)
struct Regs {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Regs cpuid(unsigned leaf, unsigned sub) {
    Regs r;
    __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool bits(unsigned value, unsigned mask) { return (value & mask) == mask; }

// Register state that the operating system saves: bits 1, 2 for AVX, 5, 6, 7 for AVX-512 and 17, 18 for AMX.
unsigned saved_state() {
    if (!bits(cpuid(1, 0).c, bit_OSXSAVE)) return 0;
    unsigned lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
}

bool has_avx2() {
    return bits(saved_state(), 0x6) && bits(cpuid(1, 0).c, bit_AVX | bit_FMA | bit_F16C) &&
           bits(cpuid(7, 0).b, bit_AVX2);
}

bool has_avx512() {
    const unsigned need = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    return has_avx2() && bits(saved_state(), 0xe6) && bits(cpuid(7, 0).b, need);
}

bool has_avx512_bf16() {
    return has_avx512() && bits(cpuid(7, 0).c, bit_AVX512VNNI) && bits(cpuid(7, 1).a, bit_AVX512BF16);
}

// Asks Linux for the tiles' state, which a process has to do before it touches them.
bool may_use_tiles() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return may;
}

bool has_amx() {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    return has_avx512_bf16() && bits(saved_state(), 0x60000) && bits(cpuid(7, 0).d, kBf16 | kTile | kInt8) &&
           may_use_tiles();
}
#endif

const std::vector<Entry>& entries() {
    static const std::vector<Entry> all = {
        {&isa_generic::table, always, true},
#ifdef HPCDECODE_EMULATED_TILES
        {&isa_amx_emulated::table, has_avx512_bf16, true},
#endif
#if defined(__x86_64__)
        {&isa_avx2::table, has_avx2, true},
        {&isa_avx512::table, has_avx512, true},
        {&isa_avx512_bf16::table, has_avx512_bf16, true},
        {&isa_amx::table, has_amx, true},
#elif defined(__aarch64__)
        {&isa_neon::table, always, false},
#endif
    };
    return all;
}

std::string join(const std::vector<std::string>& names) {
    std::string out;
    for (const std::string& n : names) out += (out.empty() ? "" : ", ") + n;
    return out;
}

}  // namespace

std::vector<std::string> built_isas() {
    std::vector<std::string> out;
    for (const Entry& e : entries()) out.emplace_back(e.table->name);
    return out;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> out;
    for (const Entry& e : entries())
        if (e.supported()) out.emplace_back(e.table->name);
    return out;
}

std::vector<std::string> untested_isas() {
    std::vector<std::string> out;
    for (const Entry& e : entries())
        if (!e.proven) out.emplace_back(e.table->name);
    return out;
}

const KernelTable& select_isa(const std::string& forced) {
    const KernelTable* best = nullptr;
    bool known = false;
    for (const Entry& e : entries()) {
        if (!forced.empty() && forced != e.table->name) continue;
        known = true;
        if (e.supported()) best = e.table;
    }
    if (best != nullptr) return *best;
    const std::string got =
        "HPCDECODE_ISA: '" + forced + "' is " + (known ? "not supported by this machine" : "unknown");
    throw std::invalid_argument(got + "; expected one of " + join(supported_isas()) + ", or unset for the best");
}

}  // namespace hpcdecode
