"""Which memory the tensors of a step may share, from the first slice to the last but one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode.model.frontend.meta import TOKENS, Meta


class Unplaceable(Exception):
    """The size of a tensor is not known from the number of a step's tokens."""


class SlotPart(NamedTuple):
    """Where a tensor lies: in which slot, and in which of its columns if others lie there, too."""

    slot: int
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Slot:
    """Memory for a tensor of any number of tokens up to some.

    Attributes:
        about: Shape and dtype of the tensor.
        memory: Elements of the tensor for the most tokens, flat.
    """

    about: Meta
    memory: Tensor

    @classmethod
    def zeros(cls, about: Meta, most: int, device: torch.device) -> Slot:
        """Return a slot for up to `most` tokens, filled with zeros: numbers that every slice takes."""
        elements = about.numel_per_token * (1 if about.token_dim is None else most)
        with torch.inference_mode(False):
            return cls(about, torch.zeros(elements, dtype=about.dtype, device=device))

    def tensor(self, size: int, columns: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor for `size` tokens, or some of its columns."""
        shape = [size if i == self.about.token_dim else n for i, n in enumerate(self.about.one_token)]
        whole = self.memory[: math.prod(shape)].view(shape)
        return whole if columns is None else whole[:, slice(*columns)]

    def rows(self, size: int, tokens: int, columns: tuple[int, int] | None = None) -> Tensor:
        """Return the first tokens of the tensor for `size` tokens."""
        whole, dim = self.tensor(size, columns), self.about.token_dim
        return whole if dim is None or tokens == size else whole.narrow(dim, 0, tokens)


class SlotPlan:
    """Deals out slots to tensors as they are made, and takes them back when nothing reads them any more.

    Attributes:
        slots: Shape and dtype of each slot.
    """

    def __init__(self) -> None:
        self.slots: list[Meta] = []
        self._free: dict[tuple[torch.dtype, tuple[int | str, ...]], list[int]] = defaultdict(list)

    def take(self, about: Meta) -> int:
        """Return a slot that nothing else is in.

        Raises:
            Unplaceable: If a size varies that is not the number of the step's tokens.
        """
        dim = about.token_dim
        if not about.static and (dim is None or about.shape[dim] != TOKENS):
            raise Unplaceable(f"a tensor of shape {about.shape}")
        if free := self._free[about.dtype, about.shape]:
            return free.pop()
        self.slots.append(about)
        return len(self.slots) - 1

    def release(self, slots: Iterable[int]) -> None:
        """Let tensors to come have these slots."""
        for slot in sorted(slots):
            self._free[self.slots[slot].dtype, self.slots[slot].shape].append(slot)

    def opened(self, most: int, device: torch.device) -> Sequence[Slot]:
        """Return memory for all slots."""
        return [Slot.zeros(about, most, device) for about in self.slots]
