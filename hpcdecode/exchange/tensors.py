"""Tensors as messages between two ranks: their shapes first, then their bytes."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.mpi.message import arriving, post
from hpcdecode.mpi.wait import Waitable


class TensorKind(msgspec.Struct, frozen=True, array_like=True):
    """Data type and shape of a tensor that follows."""

    dtype: str
    shape: list[int]


def send_tensors(comm: MPI.Intracomm, target: int, tag: int, tensors: Sequence[Tensor]) -> list[MPI.Request]:
    """Begin to send tensors; return the requests, which keep copies of those that are not dense on the host."""
    kinds = [TensorKind(str(x.dtype).removeprefix("torch."), list(x.shape)) for x in tensors]
    sent = [post(comm, target, tag, kinds)]
    return sent + [comm.Isend([bytes_of(x.detach().contiguous().cpu()), MPI.BYTE], target, tag) for x in tensors]


def receive_tensors(
    comm: MPI.Intracomm, source: int, tag: int, device: torch.device
) -> Generator[Waitable, None, list[Tensor]]:
    """Yield what to wait for; return the tensors of the next `send_tensors`, on a device."""
    kinds = yield from arriving(comm, source, tag, list[TensorKind])
    tensors = [torch.empty(kind.shape, dtype=getattr(torch, kind.dtype)) for kind in kinds]
    yield from [comm.Irecv([bytes_of(x), MPI.BYTE], source, tag) for x in tensors]
    return [x.to(device) for x in tensors]


def bytes_of(x: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous tensor on the host. One of a single element may state any strides."""
    if not x.numel():
        return np.empty(0, np.uint8)
    flat: NDArray[np.uint8] = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
    return flat
