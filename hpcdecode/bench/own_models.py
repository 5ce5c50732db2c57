"""The model of a benchmark by its name or directory; of any architecture, with an ideal by its FLOP and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from hpcdecode.bench.mixed_configs import MIXED
from hpcdecode.bench.mixed_models import MixedShape, products_of
from hpcdecode.bench.workload import SHAPES, Shape, is_gguf, llama_shape
from hpcdecode.errors import UserError
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.weight_bits import weight_bits


@dataclass(frozen=True)
class OwnShape(MixedShape):
    """Sizes of a checkpoint that is no Llama.

    Attributes:
        size: By its config.json and the headers of its files.
    """

    size: ModelSize = field(kw_only=True)

    @property
    def layer_weights(self) -> int:
        """Return the weights of the layers that a token is multiplied by."""
        return int(self.size.active_weights())

    def body_seconds(self, tokens: int, rate: float, read: float) -> float:
        """Return the least seconds of all layers: of their FLOP, or of reading the weights that tokens touch.

        Args:
            tokens: Their number.
            rate: FLOP/s of a large GEMM.
            read: Read bandwidth in bytes per second.
        """
        return max(2 * tokens * self.layer_weights / rate, self.size.read_bytes(tokens) / read)

    def head_seconds(self, tokens: int, rate: float, read: float) -> float:
        """Return the same of the logits."""
        return max(2 * tokens * self.size.head_weights / rate, self.size.head_bytes / read)


@cache
def shape_of(model: str) -> Shape:
    """Return the sizes of a name in SHAPES or of a model's directory or file; of a name in MIXED without what is kept.

    Raises:
        UserError: If there is no such name, directory or file, or if it holds no decoder with weights.
    """
    if model in SHAPES:
        return SHAPES[model]
    if model in MIXED:
        return products_of(model)
    if is_gguf(model):
        return own_shape(model)
    if not (Path(model) / "config.json").is_file() or not any(Path(model).glob("*.safetensors")):
        names = ", ".join((*SHAPES, *MIXED))
        raise UserError(
            f"--model {model}: expected one of {names}, a model directory with safetensors files, or a GGUF file"
        )
    return llama_shape(Path(model)) or own_shape(model)


def own_shape(model: str) -> OwnShape:
    """Return the sizes of the model in a directory or GGUF file, with weights as they are in memory.

    Raises:
        UserError: If there is no decoder in it that can be run.
    """
    size = msgspec.structs.replace(ModelSize.from_directory(model), bits=weight_bits(model, None))
    vocabulary = size.head_weights // size.hidden
    weights = int(size.weight_bytes + size.tied * size.head_bytes)  # packed for products beside the embedding
    return OwnShape(size.hidden, size.layers, 1, 1, 0, vocabulary, weights=weights, kept=size.shapes, size=size)
