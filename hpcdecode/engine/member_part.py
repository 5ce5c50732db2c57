"""What a member of a group of S-ranks tells all other ranks about its part of the model."""

from __future__ import annotations

import msgspec

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, PositionBias
from hpcdecode.engine.state_weights import StateWeights
from hpcdecode.model import SplitModel


class MemberPart(msgspec.Struct, frozen=True):
    """What a member of a group has of the model.

    Attributes:
        layers: First and last + 1 of its layers, those that attend and those that keep a state.
        sinks: Attention sinks of each of these, or None.
        recurrent: Weights of those that keep a state, by index of the layer.
        vocabulary: First and last + 1 of the logits that it computes.
        share: Of the weights of projections.
        sums: In a step.
        copied: Number of its layers all of whose heads every member has, as they cannot be dealt out evenly.
        sums_of_own_rows: Those of its sums to which it gives rows of tokens of its own experts alone.
        biases: Those of the layers whose scores have some, by index of the layer, with their weights.
    """

    layers: tuple[int, int]
    sinks: list[list[float] | None]
    recurrent: dict[int, StateWeights]
    vocabulary: tuple[int, int]
    share: float
    sums: int
    copied: int
    sums_of_own_rows: int = 0
    biases: dict[int, PositionBias] = {}

    @classmethod
    def of(cls, model: SplitModel) -> MemberPart:
        """Return what an S-rank with `model` has of it."""
        sinks, layers = [model.sinks(i) for i in model.layers], (model.layers.start, model.layers.stop)
        recurrent = {
            i: StateWeights.of(model.recurrent_weights(i))
            for i in model.layers
            if isinstance(model.attends[i], RecurrentShape)
        }
        about, own = ((0, model.vocab_size), 1.0, 0, 0, 0), model.membership
        if own is not None:
            copied = sum(own.copied[slice(*layers)])
            about = ((own.vocabulary.start, own.vocabulary.stop), own.share, own.sums, copied, own.sums_of_own_rows)
        biases = {i: s.bias for i in model.layers if isinstance(s := model.attends[i], LayerShape) and s.bias}
        return cls(layers, [None if s is None else s.tolist() for s in sinks], recurrent, *about, biases)
