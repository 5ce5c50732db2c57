"""What holds bytes beyond memory that has room."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Chunk = NDArray[np.uint8]


class Tier(Protocol):
    """Chunks outside the KV cache.

    Attributes:
        chunks: Number of chunks.
    """

    chunks: int

    def reserve(self) -> None:
        """Take room for all chunks at once.

        Raises:
            OSError: If there is less.
        """

    def write(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Write a chunk, or a part of it.

        Args:
            chunk: Its number.
            data: uint8 [n], aligned memory, n a multiple of `ALIGNMENT`.
            at: Byte of the chunk at which the part begins, a multiple of `ALIGNMENT`.

        Raises:
            OSError: If it was not written.
        """

    def read(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Read what was written last; arguments are those of `write`.

        Raises:
            OSError: If there is less, or it cannot be read.
        """

    def close(self) -> None:
        """Give back what it takes."""
