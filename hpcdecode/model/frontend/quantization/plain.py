"""The tensors of a checkpoint by the keys that it would have unquantised; quantised weights are computed when read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.held import Held
from hpcdecode.model.frontend.quantization.blocks import block_parts, blocks_of
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, few_bits_of
from hpcdecode.model.frontend.quantization.formats import WeightFormat, WrongTensorsError
from hpcdecode.model.frontend.quantization.scheme import OF_ACTIVATIONS, OF_KV_CACHE, Scheme
from hpcdecode.model.frontend.stack import Pieces
from hpcdecode.model.frontend.tensors import CheckpointTensor
from hpcdecode.system.memory import huge_zeros
from hpcdecode.system.threads import ELEMENTS_AT_ONCE, fill_rows

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
LARGE_BYTES = 32 << 20
CODES_OF_FLOAT32 = 4  # that take as many bytes, at least
SAMPLED_ROWS = 32  # at most: a multiple of those that are computed at once, or a part of a block of scales


class DequantisedTensor:
    """A weight that is computed of its codes and scales when it is read.

    Args:
        key: Its key.
        form: Its format.
        parts: The tensors that make it up, by role.
        dtype: Dtype that it is rounded to.

    Attributes:
        mapped: File that holds its codes.
        dtype: Name of its dtype in safetensors.
        shape: Its shape.

    Raises:
        UserError: If shapes or dtypes of the tensors do not fit together.
    """

    __slots__ = ("_form", "_key", "_parts", "_torch_dtype", "dtype", "mapped", "shape")

    def __init__(self, key: str, form: WeightFormat, parts: Mapping[str, CheckpointTensor], dtype: torch.dtype):
        self._key, self._form, self._parts, self._torch_dtype = key, form, parts, dtype
        self.mapped, self.dtype = parts["codes"].mapped, NAMES[dtype]
        try:
            self.shape = form.shape(parts)
        except WrongTensorsError as e:
            raise self._wrong(e) from e

    def __call__(self) -> Tensor:
        """Compute the weight, some rows at a time. Raise UserError if scales cannot be right."""
        if len(self.shape) == 3:
            matrix = self.matrices()
            return torch.stack([matrix(i) for i in range(self.shape[0])])
        return self._filled(self._prepared())

    def matrices(self) -> Callable[[int], Tensor]:
        """Return what computes one of the matrices of a weight [matrices, rows, columns], by its number."""
        parts = self._prepared()
        return lambda i: self._filled({role: part[i] for role, part in parts.items()})

    def _prepared(self) -> Mapping[str, Tensor]:
        try:
            return self._form.prepared(self._stored(), self.shape)
        except WrongTensorsError as e:
            raise self._wrong(e) from e

    def _stored(self) -> dict[str, Tensor]:
        return {role: stored() for role, stored in self._parts.items()}

    def few_bits(self) -> Held:
        """Return what holds its numbers in few bits."""
        return few_bits_of(self._form, self._parts, self.shape)

    def blocks(self, by_column: bool = False) -> Tensor:
        """Return the blocks of a matrix whose `few_bits` are one of BLOCKS, uint8 [out, bytes].

        Args:
            by_column: Whether it is [in, out].
        """
        name = self._block_type(by_column)
        return self._in_blocks(name, self._block_parts(name), by_column)

    def expert_blocks(self, by_column: bool = False) -> Callable[[int], tuple[Pieces, Tensor]]:
        """Return what makes the blocks of an expert, uint8 [out, bytes], and some of its numbers, by its number.

        Args:
            by_column: Whether they are [in, out].
        """
        name = self._block_type(by_column)
        of_all = self._block_parts(name)

        def of(i: int) -> tuple[Pieces, Tensor]:
            own = {role: part[i] for role, part in of_all.items()}
            return (self._in_blocks(name, own, by_column),), self._first_rows(own)

        return of

    def sample(self) -> Tensor:
        """Return some of the first rows of a matrix in float32."""
        return self._first_rows(self._prepared())

    def _first_rows(self, parts: Mapping[str, Tensor]) -> Tensor:
        return self._form.rows(parts, 0, min(self._form.rows_at_once(), SAMPLED_ROWS, self.shape[-2]))

    def _block_type(self, by_column: bool) -> str:
        held = self.few_bits()
        name = held.by_column if by_column else held.by_row
        assert name is not None, "asked only for weights in blocks"
        return name

    def _block_parts(self, name: str) -> dict[str, Tensor]:
        try:
            return block_parts(name, self._form, self._stored(), self.shape)
        except WrongTensorsError as e:
            raise self._wrong(e) from e

    def _in_blocks(self, name: str, parts: Mapping[str, Tensor], by_column: bool) -> Tensor:
        """Return the blocks of a matrix, made some outputs at a time."""
        outputs, inputs = reversed(self.shape[-2:]) if by_column else self.shape[-2:]
        size, step = BLOCKS[name], self._rows_at_once(max(inputs // CODES_OF_FLOAT32, 1))
        made = torch.empty(outputs, inputs // size.inputs * size.bytes, dtype=torch.uint8)
        return fill_rows(made, step, blocks_of(name, self._form, parts, inputs, by_column))

    def _rows_at_once(self, elements: int) -> int:
        """Return how many rows of so many float32 numbers a thread computes at once."""
        multiple = self._form.rows_at_once()
        return max(ELEMENTS_AT_ONCE // elements // multiple, 1) * multiple

    def _filled(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return a matrix, computed some rows at a time."""
        matrix = empty(self.shape[-2:], self._torch_dtype)
        return fill_rows(matrix, self._rows_at_once(self.shape[-1]), partial(self._form.rows, parts))

    def _wrong(self, error: WrongTensorsError) -> UserError:
        return UserError(
            f"{self.mapped.file}: weight {self._key!r} ({self._form.name}): {error}; copy the checkpoint again"
        )


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for a weight, in huge pages if it is large.

    A small one, of which a model may have as many as experts, takes no mapping of its own: a process may have 65,530.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return huge_zeros(nbytes).view(dtype).view(shape)


def plain_tensors(
    tensors: Mapping[str, CheckpointTensor], scheme: Scheme, dtype: torch.dtype
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a quantised checkpoint by the keys that it would have unquantised.

    Tensors that belong to a quantised weight are left out, as are scales of its activations and of the KV cache. All
    others stay, even if they look like scales.

    Args:
        tensors: Tensors of the checkpoint, by key.
        scheme: How its weights are quantised.
        dtype: Dtype that weights are rounded to.

    Raises:
        UserError: If tensors of a weight are missing, superfluous or do not fit together.
    """
    left: dict[str, CheckpointTensor] = dict(tensors)
    weights: dict[str, CheckpointTensor] = {}
    for key, codes in tensors.items():
        if (form := scheme.format_of(key, codes)) is not None:
            name, parts = form.weight_key(key), gathered(key, form, tensors)
            for part in parts.values():
                left.pop(part, None)
            if name in left or name in weights:
                raise UserError(f"{codes.mapped.file}: expected one weight {name!r}, got a quantised one and another")
            weights[name] = DequantisedTensor(name, form, {role: tensors[k] for role, k in parts.items()}, dtype)
    modules = {key.rpartition(".")[0] for key in weights}
    for key in list(left):
        module, _, leaf = key.rpartition(".")
        if leaf in OF_KV_CACHE or (leaf in OF_ACTIVATIONS and module in modules):
            del left[key]
    return left | weights


def gathered(key: str, form: WeightFormat, tensors: Mapping[str, CheckpointTensor]) -> dict[str, str]:
    """Return the keys of the tensors that make up a weight, by role.

    Args:
        key: Key of its codes.
        form: Its format.
        tensors: Tensors of the checkpoint, by key.

    Raises:
        UserError: If the checkpoint lacks one, or has two for a role.
    """
    name = form.weight_key(key)
    module = name.rpartition(".")[0]
    parts = {"codes": key}
    for role, templates in (*form.needed.items(), *form.optional.items()):
        names = [template.format(key=name, module=module) for template in templates]
        there = [each for each in names if each in tensors]
        if len(there) > 1 or (not there and role in form.needed):
            came = "both" if there else "none"
            raise UserError(
                f"{tensors[key].mapped.file}: weight {name!r} ({form.name}): expected a tensor "
                f"{' or '.join(map(repr, names))} beside it, got {came}; copy the checkpoint again"
            )
        if there:
            parts[role] = there[0]
    return parts
