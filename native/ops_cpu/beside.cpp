#include "beside.h"

#include <algorithm>

namespace hpcdecode::ops {

void AttentionBeside::start(int layer, const SequenceRows& rows) {
    layer_ = layer;
    left_ = rows;
    foresee();
}

void AttentionBeside::foresee() {
    lines_.clear();
    fetched_ = 0;
    foreseen_ = left_.count > 0 ? attention_.foresee(layer_, left_, lines_) : 0;
}

Lines AttentionBeside::fetch(int64_t bytes) {
    if (fetched_ == lines_.size()) return {};
    Lines& from = lines_[fetched_];
    const Lines part{from.begin, from.begin + std::min<int64_t>(bytes, from.end - from.begin)};
    from.begin = part.end;
    if (from.begin == from.end) ++fetched_;
    return part;
}

void AttentionBeside::work() {
    if (foreseen_ == 0 || fetched_ < lines_.size()) return;
    attention_.attend(layer_, thread_, left_.part(0, foreseen_));
    left_ = left_.part(foreseen_, left_.count);
    foresee();
}

void AttentionBeside::finish() {
    if (left_.count > 0) attention_.attend(layer_, thread_, left_);
    left_.count = 0;
    foresee();
}

}  // namespace hpcdecode::ops
