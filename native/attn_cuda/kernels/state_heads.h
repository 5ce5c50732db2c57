// The recurrence of heads with many values. A state stays in registers from a sequence's first token of a call to its
// last, so that it is read and written once.
//
// A warp has 16 columns of a head's state: a lane has four of them, and every eighth group of four rows. Sums over rows
// go over the eight lanes in a fixed order, so a result does not depend on what else is in the call.
#pragma once
#include "per_row.h"
#include "state_inputs.h"

namespace hpcdecode {

constexpr int kRowLanes = 8;
constexpr int kWarpColumns = 16;
constexpr int kRowsTogether = 4 * kRowLanes;  // rows that a warp has in four registers of each column
constexpr float kNormEpsilon = 1e-6f;         // beside the square of a norm

struct alignas(8) TwoWords {
    uint32_t w[2];
};

HPC_DEVICE FourFloats load_four(const float* p) { return *reinterpret_cast<const FourFloats*>(p); }
HPC_DEVICE FourFloats load_four(const uint16_t* p) {
    const TwoWords two = *reinterpret_cast<const TwoWords*>(p);
    return {as_float(two.w[0] << 16), as_float(two.w[0] & 0xffff0000u), as_float(two.w[1] << 16),
            as_float(two.w[1] & 0xffff0000u)};
}
HPC_DEVICE void store_four(float* p, const FourFloats& x) { *reinterpret_cast<FourFloats*>(p) = x; }
HPC_DEVICE void store_four(uint16_t* p, const FourFloats& x) {
    *reinterpret_cast<TwoWords*>(p) = {{two_bf16(x.v[0], x.v[1]), two_bf16(x.v[2], x.v[3])}};
}
// Return what a state's number is once it has been kept.
HPC_DEVICE float kept_as(const float*, float x) { return x; }
HPC_DEVICE float kept_as(const uint16_t*, float x) { return float_of_bf16(bf16_of(x)); }

// How a block takes a head: its warps, and where inputs of kTokensTogether tokens lie in shared memory, in floats.
struct HeadForm {
    int warps, rows, columns;  // rows: k_dim as registers have it; columns: of the block
    int decays;                // of a token
    int64_t floats;            // all

    HPC_BOTH HeadForm(const StatesLayer& l, int rows) : rows(rows) {
        const int needed = (l.v_dim + kWarpColumns - 1) / kWarpColumns, most = kMostThreads / kWarp;
        warps = needed < most ? needed : most;
        columns = warps * kWarpColumns;
        decays = l.decay_dim > 1 ? rows : 4;
        floats = int64_t{kTokensTogether} * (2 * rows + columns + decays + 4);
    }
    HPC_BOTH int blocks(const StatesLayer& l) const { return (l.v_dim + columns - 1) / columns; }
};

// Inputs of some tokens in shared memory.
struct HeadInputs {
    float *q, *k, *v, *decay, *beta, *factors;  // factors: of q, of k

    HPC_DEVICE HeadInputs(float* at, const HeadForm& f)
        : q(at),
          k(q + kTokensTogether * f.rows),
          v(k + kTokensTogether * f.rows),
          decay(v + kTokensTogether * f.columns),
          beta(decay + kTokensTogether * f.decays),
          factors(beta + kTokensTogether) {}
};

// A head of a sequence, and the columns of it that are the block's.
struct HeadOfBlock {
    StateSequence sequence;
    int head, k_head, column;

    HPC_DEVICE HeadOfBlock(const StatesArgs& a, const Block& block, const HeadForm& f)
        : sequence(a, block.x / a.layer.heads),
          head(block.x % a.layer.heads),
          k_head(head / (a.layer.heads / a.layer.k_heads)),
          column(block.y * f.columns) {}
};

// Reads n tokens from `first` of the sequence on. Rows and columns that a head does not have are zeros.
HPC_DEVICE void read_inputs(Block& block, const StatesArgs& a, const HeadOfBlock& at, const HeadForm& f,
                            const HeadInputs& to, int64_t first, int n) {
    const StatesLayer& l = a.layer;
    const int64_t row = at.sequence.first + first, k_columns = static_cast<int64_t>(l.k_heads) * l.k_dim;
    const int threads = f.warps * kWarp;
    block.each([&](int t) {
        for (int i = t; i < n * f.rows; i += threads) {
            const int token = i / f.rows, d = i % f.rows;
            const int64_t channel = static_cast<int64_t>(at.k_head) * l.k_dim + d;
            to.q[i] = d < l.k_dim ? state_input(a, row + token, channel) : 0.0f;
            to.k[i] = d < l.k_dim ? state_input(a, row + token, k_columns + channel) : 0.0f;
        }
        for (int i = t; i < n * f.columns; i += threads) {
            const int token = i / f.columns, column = at.column + i % f.columns;
            const int64_t channel = 2 * k_columns + static_cast<int64_t>(at.head) * l.v_dim + column;
            to.v[i] = column < l.v_dim ? state_input(a, row + token, channel) : 0.0f;
        }
        const int decays = l.decay_dim > 1 ? f.rows : 1;
        for (int i = t; i < n * decays; i += threads) {
            const int token = i / decays, d = i % decays;
            const int64_t number = static_cast<int64_t>(at.head) * l.decay_dim + d;
            const bool there = d < l.decay_dim;
            const float log = !there       ? 0.0f
                              : l.has_rate ? beta_of(a, row + token, at.head) * l.rate[number]
                                           : row_float(a, row + token, number);
            to.decay[token * f.decays + d] = exp_of(log);
        }
        for (int i = t; i < n; i += threads) {
            to.beta[i] = beta_of(a, row + i, at.head);
            to.factors[2 * i] = l.scale;
            to.factors[2 * i + 1] = 1.0f;
        }
    });
}

// Multiplies the factors of q and k by what their norms become 1 by. A warp has a vector at a time.
HPC_DEVICE void normalise(Block& block, const HeadForm& f, const HeadInputs& x, int n) {
    for (int first = 0; first < 2 * n; first += f.warps) {
        Own<float> sum;
        block.each([&](int t) {
            const int vector = first + t / kWarp;
            sum[t] = 0.0f;
            if (vector >= 2 * n) return;
            const float* p = (vector % 2 == 0 ? x.q : x.k) + vector / 2 * f.rows;
            for (int d = t % kWarp; d < f.rows; d += kWarp) sum[t] += p[d] * p[d];
        });
        sum_of<kWarp>(block, sum);
        block.each([&](int t) {
            const int vector = first + t / kWarp;
            if (t % kWarp == 0 && vector < 2 * n) x.factors[vector] *= 1.0f / sqrtf(sum[t] + kNormEpsilon);
        });
    }
}

// Num: Of states. kRows: Rows of a lane. kByRow: Each row of a state has a decay of its own.
template <class Num, int kRows, bool kDelta, bool kByRow>
struct HeadRecurrence {
    static constexpr int kPadded = kRows * kRowLanes;
    struct Rows {
        FourFloats r[kRows];
    };

    Block& block;
    const StatesArgs& a;
    const HeadForm f;
    const HeadOfBlock at;
    const float skip;
    Own<Rows> state;

    HPC_DEVICE HeadRecurrence(Block& block, const StatesArgs& a)
        : block(block), a(a), f(a.layer, kPadded), at(a, block, f), skip(a.layer.skip ? a.layer.skip[at.head] : 0.0f) {}

    HPC_DEVICE static int lane_row(int t, int i) { return i / 4 * kRowsTogether + t % kRowLanes * 4 + i % 4; }
    HPC_DEVICE static int column_of(int t) { return t / kRowLanes * 4; }  // of the block
    HPC_DEVICE bool has_columns(int t) const { return at.column + column_of(t) < a.layer.v_dim; }
    HPC_DEVICE Num* numbers(int t) const {
        const int64_t head = at.sequence.place * a.layer.heads + at.head;
        return static_cast<Num*>(a.layer.states) + head * a.layer.k_dim * a.layer.v_dim + at.column + column_of(t);
    }

    HPC_DEVICE void load() {
        block.each([&](int t) {
            const Num* from = numbers(t);
            HPC_UNROLL
            for (int i = 0; i < kRows; ++i) {
                const bool there = has_columns(t) && lane_row(t, i) < a.layer.k_dim;
                state[t].r[i] =
                    there ? load_four(from + static_cast<int64_t>(lane_row(t, i)) * a.layer.v_dim) : FourFloats{};
            }
        });
    }
    HPC_DEVICE void store() {
        block.each([&](int t) {
            Num* to = numbers(t);
            HPC_UNROLL
            for (int i = 0; i < kRows; ++i) {
                if (has_columns(t) && lane_row(t, i) < a.layer.k_dim)
                    store_four(to + static_cast<int64_t>(lane_row(t, i)) * a.layer.v_dim, state[t].r[i]);
            }
        });
    }

    // Multiplies a lane's rows by their decays, and returns in `sum` what the state then says of k.
    HPC_DEVICE void look(const HeadInputs& x, int token, Own<PerRow<4>>& sum) {
        block.each([&](int t) {
            sum[t].fill(0.0f);
            HPC_UNROLL
            for (int i = 0; i < kRows; i += 4) {
                const int row = token * kPadded + lane_row(t, i);
                const FourFloats k = load_four(x.k + row);
                FourFloats decay{};
                if constexpr (kByRow) decay = load_four(x.decay + row);
                HPC_UNROLL
                for (int j = 0; j < 4; ++j) {
                    FourFloats& own = state[t].r[i + j];
                    const float by = kByRow ? decay.v[j] : x.decay[token * 4];
                    HPC_UNROLL
                    for (int c = 0; c < 4; ++c) {
                        own.v[c] *= by;
                        sum[t].v[c] += own.v[c] * k.v[j];
                    }
                }
            }
        });
        sum_of_rows<kRowLanes>(block, sum);
    }

    // Writes e for k, and returns in `sum` what the state then says of q. Decays unless `look` did.
    HPC_DEVICE void update(const HeadInputs& x, int token, const Own<PerRow<4>>& e, Own<PerRow<4>>& sum) {
        block.each([&](int t) {
            sum[t].fill(0.0f);
            HPC_UNROLL
            for (int i = 0; i < kRows; i += 4) {
                const int row = token * kPadded + lane_row(t, i);
                const FourFloats k = load_four(x.k + row), q = load_four(x.q + row);
                FourFloats decay{};
                if constexpr (kByRow && !kDelta) decay = load_four(x.decay + row);
                HPC_UNROLL
                for (int j = 0; j < 4; ++j) {
                    FourFloats& own = state[t].r[i + j];
                    const float by = kDelta ? 1.0f : kByRow ? decay.v[j] : x.decay[token * 4];
                    HPC_UNROLL
                    for (int c = 0; c < 4; ++c) {
                        const float y = own.v[c] * by + k.v[j] * e[t].v[c];
                        sum[t].v[c] += y * q.v[j];
                        own.v[c] = kept_as(static_cast<Num*>(nullptr), y);
                    }
                }
            }
        });
        sum_of_rows<kRowLanes>(block, sum);
    }

    HPC_DEVICE void token(const HeadInputs& x, int n, int64_t row) {
        Own<PerRow<4>> sum, e;
        if constexpr (kDelta) look(x, n, sum);
        const float beta = x.beta[n], of_q = x.factors[2 * n], of_k = x.factors[2 * n + 1];
        block.each([&](int t) {
            const FourFloats v = load_four(x.v + n * f.columns + column_of(t));
            HPC_UNROLL
            for (int c = 0; c < 4; ++c) e[t].v[c] = beta * (kDelta ? v.v[c] - of_k * sum[t].v[c] : v.v[c]) * of_k;
        });
        update(x, n, e, sum);
        block.each([&](int t) {
            if (!has_columns(t)) return;
            const int64_t to = row * a.out_stride + static_cast<int64_t>(at.head) * a.layer.v_dim + at.column;
            HPC_UNROLL
            for (int c = 0; c < 4; ++c) {  // each of four lanes has a column
                if (t % kRowLanes != c) continue;
                const int column = column_of(t) + c;
                store_act(a.out, a.type, to + column, of_q * sum[t].v[c] + skip * x.v[n * f.columns + column]);
            }
        });
    }

    HPC_DEVICE void run() {
        load();
        const HeadInputs x(reinterpret_cast<float*>(block.smem), f);
        keep_window(block, a, at.sequence, block.y * a.layer.heads + at.head, a.layer.heads * f.blocks(a.layer),
                    f.warps * kWarp);
        for (int64_t first = 0; first < at.sequence.count; first += kTokensTogether) {
            const int64_t left = at.sequence.count - first;
            const int n = left < kTokensTogether ? static_cast<int>(left) : kTokensTogether;
            block.sync();
            read_inputs(block, a, at, f, x, first, n);
            block.sync();
            if (a.layer.normalised) {
                normalise(block, f, x, n);
                block.sync();
            }
            for (int i = 0; i < n; ++i) token(x, i, at.sequence.first + first + i);
        }
        store();
    }
};

}  // namespace hpcdecode
