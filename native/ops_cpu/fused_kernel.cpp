#include "fused_kernel.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernel_api.h"

namespace hpcdecode::ops {

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
#endif

const KernelTable& kernels_for(const std::string& isa) {
    if (isa == "generic" || isa == "neon") return isa_generic::table;
#if defined(__x86_64__)
    if (isa == "avx2") return isa_avx2::table;
    if (isa == "avx512") return isa_avx512::table;
    if (isa == "avx512_bf16") return isa_avx512_bf16::table;
    if (isa == "amx") return isa_amx::table;
#ifdef HPCDECODE_EMULATED_TILES
    if (isa == "amx_emulated") return isa_amx_emulated::table;
#endif
#endif
    throw std::invalid_argument("isa: no fused kernels for '" + isa + "' in this build");
}

namespace {

constexpr int64_t kAlign = kLine / sizeof(float);

int64_t extent(const View& view, const int64_t* dims, int rank) {
    int64_t last = view.at;
    for (int d = 0; d < rank; ++d) last += (dims[d] - 1) * view.stride[d];
    return last + 1;
}

// Prefetches what the next token loads.
void fetch(const char* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(data + at);
}

char* place(const Rows* tensors, const View& tensor, Type type, int64_t token) {
    const Rows& rows = tensors[tensor.at];
    return rows.data + token * rows.row_bytes + tensor.stride[0] * kBytes[static_cast<int>(type)];
}

void carry_out(const KernelTable& table, const Step& s, float* memory, const Rows* tensors, int64_t token) {
    const int type = static_cast<int>(s.type);
    if (s.op == Op::load) {
        const char* in = place(tensors, s.a, s.type, token);
        fetch(in + tensors[s.a.at].row_bytes, s.dims[2] * kBytes[type]);
        table.load[type](s.dims[2], in, memory + s.out.at);
    } else if (s.op == Op::store) {
        table.store[type](s.dims[2], memory + s.a.at, place(tensors, s.out, s.type, token));
    } else {
        table.run[static_cast<int>(s.op)][type](s, memory);
    }
}

// Returns whether a rotation is of few runs, each a power of two of numbers side by side.
bool rotates(const Step& s) {
    const int64_t runs = s.dims[1], size = s.dims[2];
    const bool dense = s.a.stride[2] == 1 && s.out.stride[2] == 1;
    return dense && runs <= kMostRuns && size >= kLeastRun && (size & (size - 1)) == 0;
}

// Returns the discrete Hartley transform of `size` numbers, a symmetric orthogonal matrix of numbers of about one size.
std::shared_ptr<const std::vector<float>> hartley(int64_t size) {
    std::vector<float> matrix(size * size);
    for (int64_t i = 0; i < size; ++i)
        for (int64_t j = 0; j < size; ++j) {
            const double turn = 2 * std::acos(-1.0) * static_cast<double>(i * j % size) / static_cast<double>(size);
            matrix[i * size + j] = static_cast<float>((std::cos(turn) + std::sin(turn)) / std::sqrt(size));
        }
    return std::make_shared<const std::vector<float>>(std::move(matrix));
}

}  // namespace

FusedKernel::FusedKernel(std::vector<Step> setup, std::vector<Step> body, int64_t scratch, int tensors,
                         const std::string& isa)
    : setup_(std::move(setup)),
      body_(std::move(body)),
      scratch_(scratch),
      tensors_(tensors),
      table_(&kernels_for(isa)) {
    for (const Step& s : setup_) check(s);
    for (const Step& s : body_) check(s);
    for (Step& s : body_)
        if (s.op == Op::rotate) s.matrix = matrices_.emplace_back(hartley(s.dims[1]))->data();
}

void FusedKernel::check(const Step& s) const {
    const auto inside = [&](const View& v, int rank) { return v.at >= 0 && extent(v, s.dims, rank) <= scratch_; };
    const auto rows_inside = [&](const Step& by_place) {
        const auto count = static_cast<int64_t>(by_place.scalar);
        const bool enough = by_place.op == Op::top ? count >= by_place.dims[2] : count > 0;
        return enough && by_place.a.at >= 0 && extent(by_place.a, by_place.dims, 2) - 1 + count <= scratch_;
    };
    const auto tensor = [&](const View& v) { return v.at >= 0 && v.at < tensors_ && v.stride[0] >= 0; };
    const bool sane = s.dims[0] > 0 && s.dims[1] > 0 && s.dims[2] > 0;
    const View dense_out{s.out.at, {0, 0, 1}}, dense_a{s.a.at, {0, 0, 1}};
    bool fine = sane;
    if (s.op == Op::load) {
        fine = fine && tensor(s.a) && inside(dense_out, 3);
    } else if (s.op == Op::store) {
        fine = fine && tensor(s.out) && inside(dense_a, 3);
    } else {
        const bool reduces = s.op == Op::sum || s.op == Op::peak || s.op == Op::most;
        const bool by_place = s.op == Op::top || s.op == Op::pick || s.op == Op::mark;
        fine = fine && (by_place ? rows_inside(s) : inside(s.a, 3)) && inside(s.out, reduces ? 2 : 3);
        fine = fine && (!s.has_b || inside(s.b, 3)) && (s.has_b || (s.op != Op::pick && s.op != Op::fill));
        fine = fine && s.type != Type::i8 && s.type != Type::i64;
        if (s.op == Op::rotate) fine = fine && rotates(s);
    }
    if (!fine) {
        throw std::invalid_argument("fused kernel: step " + std::to_string(static_cast<int>(s.op)) +
                                    " leaves the scratch memory or the call's tensors");
    }
}

void FusedKernel::run(int64_t first, int64_t end, const Rows* tensors) const {
    static thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < scratch_ + kAlign) kept.resize(scratch_ + kAlign);
    const auto address = reinterpret_cast<uintptr_t>(kept.data());
    float* memory = kept.data() + (-(address / sizeof(float)) & (kAlign - 1));
    for (const Step& s : setup_) carry_out(*table_, s, memory, tensors, 0);
    for (int64_t token = first; token < end; ++token)
        for (const Step& s : body_) carry_out(*table_, s, memory, tensors, token);
}

}  // namespace hpcdecode::ops
