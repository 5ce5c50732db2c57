#include "bind_forms.h"

#include "blocks.h"
#include "weight_form.h"

namespace nb = nanobind;

namespace hpcdecode::ops {

void bind_forms(nb::module_& m) {
    nb::enum_<WeightForm>(m, "WeightForm", "How packed weights hold their numbers.")
        .value("plain", WeightForm::plain)
        .value("int4", WeightForm::int4)
        .value("mxfp4", WeightForm::mxfp4)
        .value("fp8", WeightForm::fp8)
        .value("q4_1", WeightForm::q4_1)
        .value("q8_0", WeightForm::q8_0)
        .value("q4_k", WeightForm::q4_k)
        .value("q5_k", WeightForm::q5_k)
        .value("q6_k", WeightForm::q6_k)
        .value("nf4", WeightForm::nf4)
        .value("nvfp4", WeightForm::nvfp4)
        .value("i8", WeightForm::i8)
        .value("q2_k", WeightForm::q2_k)
        .value("q3_k", WeightForm::q3_k)
        .value("iq4_nl", WeightForm::iq4_nl)
        .value("iq4_xs", WeightForm::iq4_xs)
        .value("mxfp8", WeightForm::mxfp8)
        .value("q5_1", WeightForm::q5_1)
        .value("bf16", WeightForm::bf16)
        .value("f16", WeightForm::f16);

    nb::enum_<BlockType>(m, "BlockType", "Blocks of weights in GGUF files, and our own.")
        .value("q4_0", BlockType::q4_0)
        .value("q4_1", BlockType::q4_1)
        .value("q5_0", BlockType::q5_0)
        .value("q8_0", BlockType::q8_0)
        .value("q4_k", BlockType::q4_k)
        .value("q5_k", BlockType::q5_k)
        .value("q6_k", BlockType::q6_k)
        .value("nf4", BlockType::nf4)
        .value("nvfp4", BlockType::nvfp4)
        .value("i8", BlockType::i8)
        .value("q2_k", BlockType::q2_k)
        .value("q3_k", BlockType::q3_k)
        .value("iq4_nl", BlockType::iq4_nl)
        .value("iq4_xs", BlockType::iq4_xs)
        .value("q5_1", BlockType::q5_1)
        .value("mxfp4", BlockType::mxfp4)
        .value("i4", BlockType::i4)
        .value("f8", BlockType::f8)
        .value("mx4", BlockType::mx4)
        .value("mx8", BlockType::mx8);
}

}  // namespace hpcdecode::ops
