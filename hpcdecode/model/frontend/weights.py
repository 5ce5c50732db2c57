"""Weights of a model, each read from the checkpoint when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.checkpoint import Stack
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.plausible import check_values
from hpcdecode.model.frontend.sources import Conversion, Sources
from hpcdecode.model.frontend.tensors import CheckpointTensor


class Weights(Mapping[str, Tensor | Stack]):
    """The weights of a model by name. A weight is read each time that it is asked for while nobody holds it.

    A tensor on the CPU that has its dtype already is used without a copy.

    Args:
        path: Model directory.
        tensors: Tensors of the checkpoint, by key.
        sources: Tensors that make up each weight.
        wanted: Shape and dtype of the weights, by name.
        device: Device for the weights.

    Raises:
        UserError: If weights are missing; when a weight is read, if its shape or its values cannot be right.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, CheckpointTensor],
        sources: Sources,
        wanted: Mapping[str, Meta],
        device: torch.device,
    ):
        self._path, self._tensors, self._sources, self._device = path, tensors, sources, device
        self._wanted = wanted
        self._like = {sources.ties.get(name, name): about for name, about in wanted.items()}
        self._conversions = {name: c for c in sources.conversions for name in c.names}
        self._held: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._made: dict[str, Tensor] = {}  # by a conversion that was run for another weight
        self._check_names()
        for source, key in sources.keys.items():
            self._check_shape(source, tensors[key].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, name: object) -> bool:
        return name in self._wanted

    def __getitem__(self, name: str) -> Tensor | Stack:
        if name not in self._wanted:
            raise KeyError(name)
        source = self._sources.ties.get(name, name)
        held = self._held.get(source)
        if held is not None:
            return held
        weight = self._placed(source)
        self._check_shape(source, weight.shape)
        check_values(self._path, {name: weight})
        if isinstance(weight, Tensor):
            self._held[source] = weight
        return weight

    def _placed(self, source: str) -> Tensor | Stack:
        """Return the weight `source` in its dtype on the device, without a copy if it is that already."""
        about = self._like[source]
        if experts := self._sources.stacks.get(source):
            pieces = (tuple(self._tensors[key]() for key in keys) for keys in experts)
            return Stack(tuple(piece.to(device=self._device, dtype=about.dtype) for piece in own) for own in pieces)
        return self._read(source).to(device=self._device, dtype=about.dtype)

    def _read(self, source: str) -> Tensor:
        if key := self._sources.keys.get(source):
            return self._tensors[key]()
        if source not in self._made:
            self._made.update(self._converted(self._conversions[source]))
        return self._made.pop(source)

    def _converted(self, conversion: Conversion) -> dict[str, Tensor]:
        """Return the weights of `conversion` that are wanted."""
        return {name: value for name, value in conversion.run(self._tensors).items() if name in self._like}

    def _check_names(self) -> None:
        """Raise UserError if the checkpoint lacks weights."""
        known = self._sources.keys.keys() | self._sources.stacks.keys() | self._conversions.keys()
        missing = sorted(name for name in self._wanted if self._sources.ties.get(name, name) not in known)
        if missing:
            raise UserError(
                f"{self._path} lacks {len(missing)} of {len(self._wanted)} tensors of the model, among them "
                f"{missing[0]!r}: the checkpoint is incomplete or belongs to another config.json"
            )

    def _check_shape(self, source: str, shape: tuple[int, ...]) -> None:
        """Raise UserError if the weight `source` has not the shape that the model has for it."""
        came, expected = list(shape), list(self._like[source].shape)
        if came != expected:
            raise UserError(
                f"{self._path}: tensor {source!r} has shape {came}, config.json asks for {expected}: "
                "one of the two is wrong"
            )
