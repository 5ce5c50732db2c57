"""Seals: the last bytes of a file in a job's folder of parts, which show that it is whole and name its job.

A seal has SEAL_BYTES: a mark, 16 characters that name the job, and the CRC-32 of everything before the seal. HDF5
ignores bytes after its data.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

_MARK = b"\nhpcdecode sealed for job "
_JOB_CHARACTERS = 16
_BLOCK_BYTES = 1 << 22  # read at once
SEAL_BYTES = len(_MARK) + _JOB_CHARACTERS + 9


class Damaged(Exception):
    """The content of a file has changed since it was sealed, or its seal is missing."""


def sealed(data: bytes, job: str) -> bytes:
    """Return `data` followed by its seal for the job named `job`."""
    return data + _seal(zlib.crc32(data), job)


def seal_file(descriptor: int, size: int, job: str) -> None:
    """Append a seal to an open file.

    Args:
        descriptor: Descriptor of the file, open for reading and writing.
        size: Bytes that the file is to have before its seal.
        job: Name of the job.

    Raises:
        OSError: The disk refuses it.
    """
    os.ftruncate(descriptor, size)  # HDF5 may not have written its last bytes
    crc, position = 0, 0
    while block := os.pread(descriptor, _BLOCK_BYTES, position):
        crc, position = zlib.crc32(block, crc), position + len(block)
    os.pwrite(descriptor, _seal(crc, job), position)


def sealed_for(path: Path) -> str | None:
    """Read a whole file and return the job that its seal names, or None if it has no seal.

    Raises:
        Damaged: The content has changed since the file was sealed.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        left = max(os.fstat(file.fileno()).st_size - SEAL_BYTES, 0)
        crc = 0
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            crc, left = zlib.crc32(block, crc), left - len(block)
        seal = file.read()
    if not seal.startswith(_MARK):
        return None
    job = seal[len(_MARK) :][:_JOB_CHARACTERS].decode(errors="replace")
    if seal != _seal(crc, job):
        raise Damaged(f"{path}: its checksum is not that of its content")
    return job


def unsealed(path: Path) -> tuple[bytes, str]:
    """Return the content of a small sealed file, and the name of its job.

    Raises:
        Damaged: The content has changed since the file was sealed, or there is no seal.
        OSError: The file cannot be read.
    """
    job = sealed_for(path)
    if job is None:
        raise Damaged(f"{path}: it has no seal")
    return path.read_bytes()[:-SEAL_BYTES], job


def _seal(crc: int, job: str) -> bytes:
    return _MARK + job.encode(errors="replace") + b" %08x" % crc
