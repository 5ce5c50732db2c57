"""The tensors of the GGUF files of a model by the keys of its checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.changes import SAME, Change, Values
from hpcdecode.model.frontend.gguf.experts import ExpertTensor
from hpcdecode.model.frontend.gguf.header import GgufEntry, GgufHeader
from hpcdecode.model.frontend.gguf.joined import JoinedTensor
from hpcdecode.model.frontend.gguf.names import Experts, GgufPart, is_left_out, key_of, part_of, predicts
from hpcdecode.model.frontend.gguf.tables import own_values, table_of
from hpcdecode.model.frontend.gguf.tensors import GgufTensor, read_headers
from hpcdecode.model.frontend.mapped import MappedFile
from hpcdecode.model.frontend.stated import MOST
from hpcdecode.model.frontend.tensors import CheckpointTensor


class Stored(NamedTuple):
    """A tensor in the table of a mapped GGUF file.

    Attributes:
        mapped: The file.
        data: Its content.
        entry: The tensor.
        dtype: Dtype that weights are rounded to.
    """

    mapped: MappedFile
    data: np.ndarray[Any, Any]
    entry: GgufEntry
    dtype: torch.dtype

    def read(self, change: Change = SAME, expert: int | None = None) -> GgufTensor:
        """Return it, or one expert's matrix of it, as a tensor of the checkpoint."""
        return GgufTensor(self.mapped, self.data, self.entry, change, self.dtype, expert)

    def experts(self, dims: Sequence[int] = (2, 3)) -> range:
        """Return the numbers of its experts, which its first dimension counts, if it has one of `dims` dimensions."""
        name, shape = self.entry.name, self.entry.shape
        if len(shape) in dims and shape[0] <= MOST["num_experts"]:
            return range(shape[0])
        raise UserError(f"tensor {name!r:.100}: expected [experts, rows, columns], got {list(shape)}")


def open_gguf(files: Sequence[Path], dtype: torch.dtype) -> dict[str, CheckpointTensor]:
    """Return the tensors of a model in GGUF files, by the keys of its checkpoint.

    Args:
        files: The files, the first one first.
        dtype: Dtype that weights are rounded to.

    Raises:
        UserError: If a file is damaged, or has a tensor that the architecture does not have.
    """
    headers = read_headers([file.resolve() for file in files])
    architecture, table = table_of(headers[0])
    values, found = own_values(headers[0], architecture), dict[str, CheckpointTensor]()
    parts = defaultdict[str, dict[GgufPart, Stored]](dict)
    for header in headers:
        for stored in stored_in(header, dtype):
            name = stored.entry.name
            if is_left_out(name):
                continue
            if (part := part_of(table, name)) is not None:
                parts[part.key][part] = stored
                continue
            key = key_of(table, name)
            if key is None and predicts(name, values):  # such as a head of its own
                continue
            if key is None:
                raise UserError(f"{header.file}: tensor {name!r:.100} is not one of the architecture {architecture!r}")
            if "{}" in key:
                found |= {key.format(expert): stored.read(SAME, expert) for expert in stored.experts((3,))}
            else:
                found[key] = stored.read(table.change(name, values))
    return found | {key: whole_of(own, values) for key, own in parts.items()}


def stored_in(header: GgufHeader, dtype: torch.dtype) -> Iterator[Stored]:
    """Yield the tensors of a file."""
    data = np.memmap(header.file, mode="c")  # torch takes no memory that cannot be written to
    mapped = MappedFile(header.file, data, partial(getattr, data.ctypes, "data"))
    yield from (Stored(mapped, data, entry, dtype) for entry in header.tensors.values())


def whole_of(parts: Mapping[GgufPart, Stored], values: Values) -> CheckpointTensor:
    """Return a tensor of the checkpoint, of its parts in GGUF files.

    Raises:
        UserError: If parts are missing, or of shapes that do not fit.
    """
    first, *_ = parts
    own = {part.number: stored for part, stored in sorted(parts.items(), key=lambda item: item[0].number)}
    of_experts = isinstance(first.whole, Experts) and [stored.experts() for stored in own.values()]
    shapes = {stored.entry.shape for stored in own.values()}
    if len(own) != len(first.names) or (of_experts and len(shapes) != 1):
        file, expected = own[first.number].mapped.file, " and ".join(map(repr, first.names))
        came = ", ".join(f"{stored.entry.name!r} {list(stored.entry.shape)}" for stored in own.values())
        raise UserError(f"{file}: expected tensors {expected} of one shape, got {came}; copy the file again")
    if not isinstance(first.whole, Experts):
        return JoinedTensor(first.key, [stored.read() for stored in own.values()], first.whole.layout(values))
    return ExpertTensor([[stored.read(SAME, e) for stored in own.values()] for e in own[0].experts()], first.whole)
