"""Seals: what ends a file of a job in its folder of parts, and tells whether it is whole and whose it is.

A seal is SEAL_BYTES long: a mark, 16 characters that name the job, and the CRC-32 of everything before it. HDF5 ignores
what follows its data.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from typing import Any

import msgspec

_MARK = b"\nhpcdecode sealed for job "
_JOB_CHARACTERS = 16
_BLOCK = 1 << 22  # bytes read at once
SEAL_BYTES = len(_MARK) + _JOB_CHARACTERS + 9


class Damaged(Exception):
    """A file is not as it was written."""


def job_name(identity: Any) -> str:
    """Name a job by its identity, in 16 hexadecimal digits."""
    text = msgspec.json.encode(identity, enc_hook=str, order="sorted")
    return hashlib.sha256(text).hexdigest()[:_JOB_CHARACTERS]


def sealed(data: bytes, job: str) -> bytes:
    """`data` and its seal."""
    return data + _seal(zlib.crc32(data), job)


def seal_file(descriptor: int, size: int, job: str) -> None:
    """Seal an open file of `size` bytes. Raises OSError."""
    os.ftruncate(descriptor, size)  # HDF5 may not have written its last bytes
    crc, position = 0, 0
    while block := os.pread(descriptor, _BLOCK, position):
        crc, position = zlib.crc32(block, crc), position + len(block)
    os.pwrite(descriptor, _seal(crc, job), position)


def sealed_for(path: Path) -> str | None:
    """Read a whole file and return the job that its seal names, or None if it has no seal.

    Raises Damaged if the file is not as it was sealed, and OSError.
    """
    with open(path, "rb") as file:
        left = max(os.fstat(file.fileno()).st_size - SEAL_BYTES, 0)
        crc = 0
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            crc, left = zlib.crc32(block, crc), left - len(block)
        seal = file.read()
    if not seal.startswith(_MARK):
        return None
    job = seal[len(_MARK) :][:_JOB_CHARACTERS].decode(errors="replace")
    if seal != _seal(crc, job):
        raise Damaged(f"{path}: its checksum is not that of its content")
    return job


def unsealed(path: Path) -> tuple[bytes, str]:
    """Content of a small sealed file, and its job. Raises Damaged and OSError."""
    job = sealed_for(path)
    if job is None:
        raise Damaged(f"{path}: it has no seal")
    return path.read_bytes()[:-SEAL_BYTES], job


def _seal(crc: int, job: str) -> bytes:
    return _MARK + job.encode(errors="replace") + b" %08x" % crc
