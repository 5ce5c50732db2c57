"""Pieces whose rows and outputs are in host memory, attended on a device: copied both ways beside other work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hpcdecode.exchange.device import Accelerator
from hpcdecode.mpi.wait import Waitable

Attend = Callable[[Tensor, Tensor, Tensor], None]  # of rows, prompts and outputs, which are on the device


class _PieceImage:
    """Memory of the device for one piece at a time; `mark` is done once it is free."""

    def __init__(self, device: Accelerator, size: int, dtype: torch.dtype):
        self.memory = device.empty(size + size // 4, dtype)
        self.mark = device.tell(_nothing)


class DevicePieces:
    """Copies pieces to a device and outputs back, on streams of their own, so that pieces of other lanes go on.

    Args:
        device: That attends.
    """

    def __init__(self, device: Accelerator):
        self.device = device
        self._images: list[_PieceImage] = []

    def attend(self, attend: Attend, rows: Tensor, prompts: Tensor, out: Tensor) -> Waitable:
        """Let the device attend to rows that stay as they are until the mark is done, which is returned."""
        sizes = [rows.numel(), prompts.numel(), out.numel()]
        image = self._free(sum(sizes), rows.dtype)
        parts = image.memory[: sum(sizes)].split(sizes)
        there = [part.view(matrix.shape) for part, matrix in zip(parts, (rows, prompts, out), strict=True)]
        self.device.into(
            [(to, host) for to, host in zip(there, (rows, prompts), strict=False) if len(host)], image.mark
        )
        mark = self.device.tell(partial(attend, *there))
        image.mark = self.device.out([(out, there[2])]) if len(out) else mark
        return image.mark

    def _free(self, size: int, dtype: torch.dtype) -> _PieceImage:
        """Return memory that no piece under way has, of `size` elements."""
        free = [image for image in self._images if image.mark.Test()]
        for image in free:
            if len(image.memory) >= size:
                return image
            self._images.remove(image)
        self._images.append(_PieceImage(self.device, size, dtype))
        return self._images[-1]


def _nothing() -> None:
    """Compute nothing."""
