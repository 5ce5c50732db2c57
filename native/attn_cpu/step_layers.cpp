#include "step_layers.h"

#include <stdexcept>
#include <string>

namespace hpcdecode {

StepLayers::StepLayers(StepAttention* attention, StepStates* states, std::vector<StepLayer> layers)
    : attention_(attention), states_(states), layers_(std::move(layers)) {
    for (size_t i = 0; i < layers_.size(); ++i)
        if (layers_[i].attends ? attention_ == nullptr : states_ == nullptr)
            throw std::invalid_argument("layer " + std::to_string(i) + ": expected " +
                                        (layers_[i].attends ? "attention" : "states") + " of the step, got none");
}

void StepLayers::begin(int64_t sequences, int threads) {
    if (attention_ != nullptr) attention_->begin(sequences, threads);
    if (states_ == nullptr) return;
    try {
        states_->begin(sequences, threads);
    } catch (...) {
        if (attention_ != nullptr) attention_->cancel();
        throw;
    }
}

RowAttention& StepLayers::of(const StepLayer& layer) const {
    if (layer.attends) return *attention_;
    return *states_;
}

void StepLayers::attend(int layer, int thread, const SequenceRows& rows) {
    of(layers_[layer]).attend(layers_[layer].place, thread, rows);
}

int64_t StepLayers::foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const {
    return of(layers_[layer]).foresee(layers_[layer].place, rows, lines);
}

void StepLayers::end() {
    if (attention_ != nullptr) attention_->end();
    if (states_ != nullptr) states_->end();
}

double StepLayers::seconds() const {
    return (attention_ == nullptr ? 0.0 : attention_->seconds()) + (states_ == nullptr ? 0.0 : states_->seconds());
}

}  // namespace hpcdecode
