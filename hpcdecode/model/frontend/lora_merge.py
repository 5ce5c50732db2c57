"""A LoRA adapter that is merged into each weight when it is read: w + scale * B A, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.experts import ExpertTensor
from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.lora import LoraUpdate, TargetWeight, updates_of
from hpcdecode.model.frontend.lora_files import FLOATS, AdapterFile, read_adapter, refused
from hpcdecode.model.frontend.quantization.plain import DequantisedTensor
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.tensors import CheckpointTensor


class MergedTensor:
    """A tensor of a checkpoint with an adapter's update: a matrix, or those of all experts, updated one at a time.

    Args:
        stored: The tensor, [.., ..] or [E, .., ..].
        merge: Returns the updated matrix, given the number of its expert, 0 without, and that of the checkpoint, both
            in float32.

    Attributes:
        mapped: File that holds the tensor of the checkpoint.
        dtype: Name of its dtype in safetensors: that of float32.
        shape: Its shape.
    """

    __slots__ = ("_merge", "_stored", "dtype", "mapped", "shape")

    def __init__(self, stored: CheckpointTensor, merge: Callable[[int, Tensor], Tensor]):
        self._stored, self._merge = stored, merge
        self.mapped, self.dtype, self.shape = stored.mapped, "F32", stored.shape

    def matrices(self) -> Callable[[int], Tensor]:
        """Return a function that reads and updates the matrix of one expert, by its number."""
        stored = self._stored
        matrix = stored.matrices() if isinstance(stored, DequantisedTensor | ExpertTensor) else stored().__getitem__
        return lambda e: self._merge(e, matrix(e).float())

    def __call__(self) -> Tensor:
        """Read the tensor and add the update.

        Raises:
            UserError: If the update has numbers that are not finite.
        """
        if len(self.shape) == 2:
            return self._merge(0, self._stored().float())
        matrix = self.matrices()
        return torch.stack([matrix(e) for e in range(self.shape[0])])

    def few_bits(self) -> Held:
        """Return that nothing holds its numbers in fewer bits."""
        return NOT_HELD


def merged(
    tensors: Mapping[str, CheckpointTensor], sources: Sources, weights: Mapping[str, TargetWeight], folder: Path
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint with an adapter merged into them, which happens when they are read.

    Args:
        tensors: Tensors by the keys of the checkpoint, unquantised.
        sources: Which of them make up each weight of the model.
        weights: Weights of the model by name. As in PEFT it is the model that decides how they are stored, whatever
            `fan_in_fan_out` says.
        folder: Directory of the adapter.

    Raises:
        UserError: If the adapter is of a kind that is not merged, damaged, or of another model.
    """
    return Merger(tensors, sources, weights, read_adapter(folder)).run()


class Merger:
    """Merges an adapter into the tensors of a checkpoint. Arguments are those of `merged`."""

    def __init__(
        self,
        tensors: Mapping[str, CheckpointTensor],
        sources: Sources,
        weights: Mapping[str, TargetWeight],
        adapter: AdapterFile,
    ):
        self._found, self._sources, self._weights, self._adapter = dict(tensors), sources, weights, adapter
        self._uses = {key for key, _ in sources.uses()}
        self._tied = {sources.keys[root] for root in sources.ties.values() if root in sources.keys}

    def run(self) -> dict[str, CheckpointTensor]:
        """Return the tensors."""
        updates = updates_of(self._adapter, self._weights)
        for name, stored in self._adapter.whole.items():
            key = self._key(name)
            if stored.dtype not in FLOATS or stored.shape != self._found[key].shape:
                expected = f"{name!r:.200} of shape {list(self._found[key].shape)} and of floating point"
                raise self._refused(f"{expected}, got {stored.dtype} {list(stored.shape)}")
            self._found[key] = stored
        for name, update in updates.items():
            if update.experts is None:
                self._merge(name, update)
            else:
                self._merge_experts(name, update)
        return self._found

    def _key(self, name: str) -> str:
        """Return the key of the tensor that a weight is, and nothing else."""
        key, module = self._sources.keys.get(name, name), name.removesuffix(".weight")
        if name in self._sources.ties or key in self._tied:
            raise self._refused(f"weights of one use each, got {module!r:.200}, which is tied to another weight")
        if key not in self._uses:
            raise self._refused(f"weights of the model, got {module!r:.200}, which it does not have")
        return key

    def _merge(self, name: str, update: LoraUpdate) -> None:
        key = self._key(name)
        turned = name in self._weights and self._weights[name].turned
        self._check(update, self._found[key].shape, turned)
        self._wrap(key, partial(self._updated, update, slice(None), turned))

    def _merge_experts(self, name: str, update: LoraUpdate) -> None:
        """Merge an update of all experts, whose weights are one tensor of the checkpoint or several of each expert."""
        weight = self._weights[name]
        self._check(update, weight.shape[1:], weight.turned)
        if (key := self._sources.keys.get(name)) is not None:
            return self._wrap(key, partial(self._updated, update, slice(None), weight.turned))
        parts = self._sources.rows_of_experts(name, weight.shape[0], self._found)
        if parts is None:
            raise self._refused(f"experts with tensors of their own, or one of all, got others in {name!r:.200}")
        for key, e, rows in parts:
            self._wrap(key, partial(self._updated_piece, update, e, rows))

    def _wrap(self, key: str, merge: Callable[[int, Tensor], Tensor]) -> None:
        self._found[key] = MergedTensor(self._found[key], merge)

    def _updated_piece(self, update: LoraUpdate, e: int, rows: slice, _: int, stored: Tensor) -> Tensor:
        """Return some rows of the matrix of an expert, a tensor of its own, with an update."""
        return self._updated(update, rows, False, e, stored)

    def _check(self, update: LoraUpdate, expected: tuple[int, ...], turned: bool) -> None:
        shape = update.shape[::-1] if turned else update.shape
        if expected != shape:
            raise self._refused(f"{update.module!r:.200} of shape {list(expected)}, got an update of {list(shape)}")

    def _updated(self, update: LoraUpdate, rows: slice, turned: bool, e: int, stored: Tensor) -> Tensor:
        """Return a matrix, or some of its rows, with an update; turned: whether it is stored as [in, out]."""
        made = update.factor_b(e)[rows] @ update.factor_a(e)
        if not made.isfinite().all():
            raise self._refused(
                f"finite numbers, got others in an update of {update.module!r:.200} times {update.scale:.4g}"
            )
        made += stored.t() if turned else stored
        if update.magnitude is not None:
            made *= (update.magnitude().float() / made.norm(dim=1))[:, None]
            if not made.isfinite().all():
                raise self._refused(f"finite numbers, got others in {update.module!r:.200} by its magnitudes")
        return made.t() if turned else made

    def _refused(self, expected: str) -> UserError:
        return refused(self._adapter.folder, expected)
