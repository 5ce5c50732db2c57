// Finds the rows that may have their largest output in a panel.
#pragma once
#include <algorithm>

#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

// Two outputs this far apart differ when rounded to bfloat16, too.
inline float floor_of(float least) { return least - std::fabs(least) * (1.0f / 64); }

inline uint32_t screen(const Screening& s) {
    constexpr int kVectors = kPanel / kLanes;
    const float* lost_of = s.norms + kPanel;
    uint32_t found = 0;
    for (int r = 0; r < s.rows; ++r) {
        const __m512 scale = _mm512_set1_ps(s.scales[r]), lost = _mm512_set1_ps(s.lost[r]);
        const __m512 kept = _mm512_set1_ps(s.kept[r]), floor = _mm512_set1_ps(s.floors[r]);
        __m512 about[kVectors], off[kVectors];
        __mmask16 wanted[kVectors];
        bool may = false;
        for (int v = 0; v < kVectors; ++v) {
            const int first = v * kLanes, count = s.columns - first;
            wanted[v] = count < kLanes ? first_lanes(count > 0 ? count : 0) : 0xffff;
            about[v] = _mm512_mul_ps(_mm512_loadu_ps(s.results + r * kPanel + first), scale);
            off[v] = _mm512_mul_ps(kept, _mm512_loadu_ps(lost_of + first));
            off[v] = _mm512_fmadd_ps(lost, _mm512_loadu_ps(s.norms + first), off[v]);
            may |= _mm512_mask_cmp_ps_mask(wanted[v], _mm512_add_ps(about[v], off[v]), floor, _CMP_GE_OQ) != 0;
        }
        if (!may) continue;
        found |= 1u << r;
        float most = -HUGE_VALF, least = -HUGE_VALF;
        for (int v = 0; v < kVectors; ++v) {
            if (wanted[v] == 0) continue;
            most = std::max(most, _mm512_mask_reduce_max_ps(wanted[v], _mm512_add_ps(about[v], off[v])));
            least = std::max(least, _mm512_mask_reduce_max_ps(wanted[v], _mm512_sub_ps(about[v], off[v])));
        }
        s.most[r] = most;
        s.floors[r] = std::max(s.floors[r], floor_of(least));
    }
    return found;
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
