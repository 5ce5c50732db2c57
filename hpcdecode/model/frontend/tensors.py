"""Tensors of a checkpoint that have not been read."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hpcdecode.model.frontend.held import HELD_AS_STORED, NOT_HELD, Held
from hpcdecode.model.frontend.mapped import MappedFile


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint, as it is stored or computed of others when it is read."""

    @property
    def mapped(self) -> MappedFile:
        """Return the file that holds it, mapped into memory."""

    @property
    def dtype(self) -> str:
        """Return the name of its dtype in safetensors, such as BF16."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""

    def __call__(self) -> Tensor:
        """Read it."""

    def few_bits(self) -> Held:
        """Return what holds its numbers in fewer bits than activations have."""


class StoredSlice(Protocol):
    """What is read of safetensors' description of a tensor."""

    def get_dtype(self) -> str:
        """Return the dtype in safetensors' words."""

    def get_shape(self) -> list[int]:
        """Return the shape."""


class CheckpointFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]:
        """Return the names of its tensors."""

    def get_slice(self, name: str) -> StoredSlice:
        """Return the description of a tensor."""

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, backed by the mapped file."""


class StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        mapped: File that holds it.
        dtype: Name of its dtype in safetensors, such as BF16.
        shape: Its shape.
    """

    __slots__ = ("_key", "_shard", "dtype", "mapped", "shape")

    def __init__(self, mapped: MappedFile, shard: CheckpointFile, key: str):
        self.mapped, self._shard, self._key = mapped, shard, key
        about = shard.get_slice(key)
        self.dtype, self.shape = about.get_dtype(), tuple(about.get_shape())

    def __call__(self) -> Tensor:
        """Return the tensor, backed by the mapped file."""
        return self._shard.get_tensor(self._key)

    def few_bits(self) -> Held:
        """Return what holds its numbers in fewer bits than activations of float32 have."""
        return HELD_AS_STORED.get(self.dtype, NOT_HELD)
