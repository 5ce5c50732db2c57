"""The tensors of the GGUF files of a model by the keys of its checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.experts import InterleavedExperts
from hpcdecode.model.frontend.gguf.header import GgufEntry
from hpcdecode.model.frontend.gguf.names import IN_CONFIG, SAME, ExpertPart, key_of, own_values, part_of, table_of
from hpcdecode.model.frontend.gguf.tensors import GgufTensor, read_headers
from hpcdecode.model.frontend.mapped import MappedFile
from hpcdecode.model.frontend.stated import MOST
from hpcdecode.model.frontend.tensors import CheckpointTensor

Parts = dict[int, list[GgufTensor]]  # of each part, the tensors of all experts


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
    wholes, parts = dict[str, ExpertPart](), defaultdict[str, Parts](dict)
    for header in headers:
        data = np.memmap(header.file, mode="c")  # torch takes no memory that cannot be written to
        mapped = MappedFile(header.file, data, partial(getattr, data.ctypes, "data"))
        for name, entry in header.tensors.items():
            if IN_CONFIG.fullmatch(name):
                continue
            if (part := part_of(table, name)) is not None:
                own = [GgufTensor(mapped, data, entry, SAME, dtype, expert) for expert in experts_of(entry)]
                wholes[part.key], parts[part.key][part.part] = part, own
                continue
            key = key_of(table, name)
            if key is None:
                raise UserError(f"{header.file}: tensor {name!r:.100} is not one of the architecture {architecture!r}")
            for stored, expert in keys_of(key, entry):
                change = SAME if expert is not None else table.change(name, values)
                found[stored] = GgufTensor(mapped, data, entry, change, dtype, expert)
    return found | {key: interleaved(whole, parts[key]) for key, whole in wholes.items()}


def keys_of(key: str, entry: GgufEntry) -> Iterator[tuple[str, int | None]]:
    """Yield the keys that a tensor has in a checkpoint, with the number of the expert of each."""
    if "{}" in key:
        yield from ((key.format(expert), expert) for expert in experts_of(entry, (3,)))
    else:
        yield key, None


def experts_of(entry: GgufEntry, dims: Sequence[int] = (2, 3)) -> range:
    """Return the numbers of the experts of a tensor, whose first dimension counts them."""
    if len(entry.shape) in dims and entry.shape[0] <= MOST["num_experts"]:
        return range(entry.shape[0])
    raise UserError(f"tensor {entry.name!r:.100}: expected [experts, rows, columns], got {list(entry.shape)}")


def interleaved(whole: ExpertPart, parts: Mapping[int, Sequence[GgufTensor]]) -> InterleavedExperts:
    """Return a tensor of all experts, of its parts.

    Raises:
        UserError: If parts are missing, or of different shapes.
    """
    shapes = {i: (len(own), own[0].shape) for i, own in parts.items()}
    if len(shapes) != len(whole.parts) or len(set(shapes.values())) != 1:
        file, expected = next(iter(parts.values()))[0].mapped.file, " and ".join(map(repr, whole.parts))
        came = ", ".join(f"{whole.parts[i]!r} {[count, *shape]}" for i, (count, shape) in sorted(shapes.items()))
        raise UserError(f"{file}: expected tensors {expected} of one shape, got {came}; copy the file again")
    return InterleavedExperts(list(zip(*(parts[i] for i in sorted(parts)), strict=True)))
