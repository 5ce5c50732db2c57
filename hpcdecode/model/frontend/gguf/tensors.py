"""The tensors of GGUF files, each dequantised when it is read as a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.changes import SAME, Change
from hpcdecode.model.frontend.gguf.header import GgufEntry, GgufHeader, read_header
from hpcdecode.model.frontend.held import HELD_AS_STORED, NOT_HELD, Held
from hpcdecode.model.frontend.mapped import MappedFile
from hpcdecode.model.frontend.quantization.few_bits import GGUF_BLOCKS
from hpcdecode.model.frontend.quantization.plain import NAMES, empty
from hpcdecode.system.threads import ELEMENTS_AT_ONCE, fill_rows

SCALED_TWICE = ("NVFP4",)  # whose second scales are tensors of their own
FLOATS = ("F32", "F16")  # types of one element a block that are no formats of quants.py
SAMPLED_ROWS = 4


def package() -> Any:
    """Return the package gguf. Raise UserError if it is missing."""
    try:
        import gguf
    except ImportError as e:
        raise UserError("GGUF files: expected the package gguf: pip install 'hpcdecode[gguf]'", everywhere=True) from e
    return gguf


def block_sizes() -> dict[int, tuple[int, int]]:
    """Return elements and bytes of a block, by the number of each type that can be dequantised."""
    gguf = package()
    known = {kind for kind in gguf.quants._type_traits if kind.name not in SCALED_TWICE}
    known |= {gguf.GGMLQuantizationType[name] for name in FLOATS}
    return {int(kind): gguf.GGML_QUANT_SIZES[kind] for kind in known}


class GgufTensor:
    """A tensor of a GGUF file, or one expert's matrix of it.

    Args:
        mapped: The file.
        data: Its content, uint8.
        entry: The tensor.
        change: What differs from the tensor of the checkpoint.
        dtype: Dtype that it is rounded to.
        expert: Number of the expert, or None for the whole tensor.

    Attributes:
        mapped: File that holds it.
        dtype: Name of its dtype in safetensors.
        shape: Its shape.
    """

    __slots__ = ("_change", "_columns", "_kind", "_rows", "_stored", "_torch_dtype", "dtype", "mapped", "shape")

    def __init__(
        self,
        mapped: MappedFile,
        data: np.ndarray[Any, Any],
        entry: GgufEntry,
        change: Change,
        dtype: torch.dtype,
        expert: int | None = None,
    ):
        self.mapped, self._change, self._torch_dtype, self.dtype = mapped, change, dtype, NAMES[dtype]
        self._kind, self._columns = entry.type, entry.shape[-1]
        first, nbytes, self._stored = entry.first, entry.nbytes, entry.shape
        if expert is not None:
            nbytes //= entry.shape[0]
            first, self._stored = first + expert * nbytes, entry.shape[1:]
        rows = int(np.prod(self._stored[:-1]))
        self._rows = data[first : first + nbytes].reshape(rows, -1)
        self.shape = change.shape(self._stored)
        for order, count in ((change.rows, self._stored[0]), (change.columns, self._columns)):
            if order is not None and not order.fits(count):
                raise UserError(
                    f"{mapped.file}: tensor {entry.name!r}: expected rows and columns that are {list(order.sizes)} "
                    f"(-1: any number) behind {order.first}, got {count}; copy the file again"
                )

    def __call__(self) -> Tensor:
        """Dequantise it, some rows at a time."""
        weight = empty((len(self._rows), self._columns), self._torch_dtype)
        fill_rows(weight, max(ELEMENTS_AT_ONCE // self._columns, 1), self._values)
        if self._change.rows is not None:
            weight = self._change.rows.undo(weight.view(self._stored))
        if self._change.columns is not None:
            weight = self._change.columns.undo(weight.t()).t().contiguous()
        return weight.t() if self._change.transposed else weight.view(self.shape)

    def few_bits(self) -> Held:
        """Return what holds its numbers in few bits: its own type of 16 bits, or its blocks, if GEMMs take them."""
        name: str = package().GGMLQuantizationType(self._kind).name
        if name in HELD_AS_STORED and not (self._change.added or self._change.logarithm):
            return HELD_AS_STORED[name]
        if self._change._replace(rows=None) != SAME or len(self._stored) != 2:
            return NOT_HELD
        return Held(name if name in GGUF_BLOCKS else None, None)

    def blocks(self) -> Tensor:
        """Return its blocks as they are, uint8 [out, bytes], of a matrix whose `few_bits` name them."""
        rows = torch.from_numpy(self._rows)
        return rows if self._change.rows is None else self._change.rows.undo(rows)

    def sample(self) -> Tensor:
        """Return some of its rows in float32."""
        return self._values(0, len(self._rows), max(len(self._rows) // SAMPLED_ROWS, 1))

    def _values(self, first: int, last: int, step: int = 1) -> Tensor:
        """Return some rows in float32."""
        gguf = package()
        kind = gguf.GGMLQuantizationType(self._kind)
        rows = self._rows[first:last:step]
        with np.errstate(all="ignore"):  # implausible values are refused by whoever reads the weight
            if kind.name in FLOATS:
                values = rows.view({"F32": "<f4", "F16": "<f2"}[kind.name]).astype(np.float32)
            else:
                values = gguf.quants.dequantize(rows, kind).astype(np.float32, copy=False)
        return self._change.numbers(torch.from_numpy(values))


def read_headers(files: Sequence[Path]) -> list[GgufHeader]:
    """Return the headers of the files of a model.

    Raises:
        UserError: If a file is damaged, missing, or not of this model.
    """
    sizes = block_sizes()
    headers = [read_header(file, sizes) for file in files]
    names = [name for header in headers for name in header.tensors]
    if len(names) != len(set(names)):
        raise UserError(f"{files[0]}: expected each tensor in one of {len(files)} files, got some twice")
    for number, header in enumerate(headers):
        count, own = header.values.get("split.count", 1), header.values.get("split.no", 0)
        total = header.values.get("split.tensors.count", len(names))
        if max(count, 1) != len(files) or own != number or (len(files) > 1 and total != len(names)):
            raise UserError(
                f"{header.file}: expected part {number} of {len(files)} with {len(names)} tensors in all, got part "
                f"{own} of {count} with {total}; give the files of one model under their own names"
            )
    return headers
