"""What LoRA adapters that stay apart from the weights add to each of them: A and B of all adapters, as read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.lora import LoraUpdate, TargetWeight, updates_of
from hpcdecode.model.frontend.lora_files import AdapterFile, read_adapter
from hpcdecode.model.frontend.membership import WeightCut
from hpcdecode.model.frontend.plausible import check_values
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.tensors import CheckpointTensor

ROWS_AT_ONCE = 1024  # that are compared
Pieces = list[tuple[int, LoraUpdate]]  # of a matrix: its first row that is updated, and how


class AdapterUpdates(NamedTuple):
    """What an adapter adds to a weight, or to those of all experts of a layer.

    Attributes:
        module: Name of a module that is updated.
        outputs: Outputs of the weight.
        pieces: Updates of rows [out] of the matrices, by expert; of all experts those of expert -1.
    """

    module: str
    outputs: int
    pieces: Mapping[int, Pieces]

    @property
    def rank(self) -> int:
        """Return the largest rank of what is added to one matrix."""
        return max(sum(update.rank for _, update in own) for own in self.pieces.values())

    def all(self) -> list[LoraUpdate]:
        """Return the updates."""
        return [update for own in self.pieces.values() for _, update in own]

    def factor(self, part: str, e: int) -> Tensor | None:
        """Return A, "a", of the matrix of an expert, float32 [rank, in], or B, "b", [out, rank]; None without any."""
        own = self.pieces.get(-1) or self.pieces.get(e)
        if not own:
            return None
        if part == "a":
            return torch.cat([update.factor_a(e) for _, update in own])
        made, rank = torch.zeros(self.outputs, sum(update.rank for _, update in own)), 0
        for first, update in own:
            b = update.factor_b(e)
            made[first : first + len(b), rank : rank + update.rank] = b
            rank += update.rank
        return made


class UpdatedParts(NamedTuple):
    """What a member of a group reads of A and B of all adapters of a weight.

    Attributes:
        adapters: Names and directories of all adapters.
        weight: Name of the weight.
        updates: What adapters add to it, by their numbers.
        experts: Experts that the member has; the first alone of a weight that is of none.
        cut: What it takes of each A, or B; None for all.
    """

    adapters: Sequence[tuple[str, str]]
    weight: str
    updates: Mapping[int, AdapterUpdates]
    experts: Sequence[int]
    cut: WeightCut | None

    def read(self, part: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return A of all adapters and experts, or B times the scales, padded by zeros.

        Args:
            part: "a" or "b".
            shape: [adapters * experts, rank, in] of A, [adapters * experts, out, rank] of B.
            dtype: Of the tensor.

        Raises:
            UserError: If an adapter has numbers that are not finite.
        """
        made, count = torch.zeros(shape, dtype=dtype), len(self.experts)
        for number, updates in self.updates.items():
            name, folder = self.adapters[number]
            what, own = f"lora_{part.upper()} of {self.weight}", made[number * count : (number + 1) * count]
            for update in updates.all():
                check_values(Path(folder), {what: (update.a if part == "a" else update.b)()})
            for e, padded in zip(self.experts, own, strict=True):
                if (factor := updates.factor(part, e)) is not None:
                    factor = factor if self.cut is None else self.cut.of(factor)
                    padded[: factor.shape[0], : factor.shape[1]] = factor
            if not own.isfinite().all():
                scale = f" times {updates.all()[0].scale:.4g}, its scale" * (part == "b")
                raise not_kept_apart(Path(folder), name, f"finite numbers, got others in {what}{scale}")
        return made


def read_updates(
    folder: Path,
    name: str,
    sources: Sources,
    weights: Mapping[str, TargetWeight],
    tensors: Mapping[str, CheckpointTensor],
) -> dict[str, AdapterUpdates]:
    """Return what an adapter adds to the weights of a model, by their names.

    Args:
        folder: Its directory.
        name: Its name.
        sources: Which tensors of the checkpoint make up each weight of the model.
        weights: Weights of the model by name.
        tensors: Tensors of the checkpoint by their keys.

    Raises:
        UserError: If the adapter is damaged, of another model, or changes weights in another way.
    """
    adapter = read_adapter(folder)
    _require_own_tensors(adapter, name, sources, tensors)
    names, experts = {key: own for own, key in sources.keys.items()}, _rows_of_experts(sources, weights, tensors)
    found: dict[str, AdapterUpdates] = {}
    of_experts: dict[str, dict[int, Pieces]] = defaultdict(lambda: defaultdict(list))
    for key, update in updates_of(adapter, weights).items():
        weight, module = names.get(key, key), update.module
        if update.magnitude is not None:
            raise not_kept_apart(folder, name, "no magnitudes (use_dora), which rows cannot choose")
        if weight in weights:
            expected = _matrix(weights[weight])
            found[weight] = AdapterUpdates(module, expected[0], {-1: [(0, update)]})
        elif key in experts:
            weight, e, rows = experts[key]
            of_experts[weight][e].append((rows.start, update))
            expected = tensors[key].shape
            found[weight] = AdapterUpdates(module, _matrix(weights[weight])[0], of_experts[weight])
        else:
            raise not_kept_apart(folder, name, f"weights of the model, got {module!r:.200}, which it does not have")
        if expected != update.shape:
            shapes = f"{list(expected)}, got an update of {list(update.shape)}"
            raise not_kept_apart(folder, name, f"{module!r:.200} of shape {shapes}")
    return found


def _matrix(weight: TargetWeight) -> tuple[int, ...]:
    """Return [out, in] of a weight, or of that of one expert."""
    shape = weight.shape[-2:]
    return shape[::-1] if weight.turned else shape


def _rows_of_experts(
    sources: Sources, weights: Mapping[str, TargetWeight], tensors: Mapping[str, CheckpointTensor]
) -> dict[str, tuple[str, int, slice]]:
    """Return by key of a tensor that is of one expert the weight that it is a part of, the expert and the rows."""
    stacked = ((name, w.shape[0]) for name, w in weights.items() if len(w.shape) == 3 and not w.turned)
    return {
        key: (name, e, rows)
        for name, experts in stacked
        for key, e, rows in sources.rows_of_experts(name, experts, tensors) or ()
    }


def _require_own_tensors(
    adapter: AdapterFile, name: str, sources: Sources, tensors: Mapping[str, CheckpointTensor]
) -> None:
    """Raise UserError if an adapter brings tensors in place of the model's that are others.

    PEFT writes those of embeddings, unchanged, too, where it updates the LM head.
    """
    for key, stored in adapter.whole.items():
        held = sources.ties.get(key, key)
        own = tensors.get(sources.keys.get(held, held))
        if own is None or own.shape != stored.shape or not _same(own(), stored()):
            raise not_kept_apart(adapter.folder, name, f"no tensors but the model's own, got another {key!r:.200}")


def _same(one: Tensor, other: Tensor) -> bool:
    parts = zip(one.split(ROWS_AT_ONCE), other.split(ROWS_AT_ONCE), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in parts)


def not_kept_apart(folder: Path, name: str, expected: str) -> UserError:
    """Return the error for an adapter that rows cannot choose."""
    return UserError(
        f"--lora {name}={folder}: expected {expected}; mend it, or merge it into the model for all rows by --lora DIR"
    )
