"""Tells the format of a prompt file by its content; its name decides only where the content does not."""

from __future__ import annotations

import enum

from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable

HEAD_BYTES = 1 << 20  # that are looked at
_TEXT_BYTES = 4096  # of them, from the first that is not blank
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16)))  # frames, and skippable ones
ARROW_FILE, ARROW_STREAM = b"ARROW1\0\0", b"\xff\xff\xff\xff"
EXPECTED = "expected JSON Lines, a JSON array, CSV, TSV, Parquet, Arrow or HDF5"


class FileFormat(enum.Enum):
    """What a prompt file is, once it is unpacked."""

    LINES = "JSON Lines"
    ARRAY = "a JSON array"
    CSV = "CSV"
    TSV = "TSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"
    HDF5 = "HDF5"

    @property
    def is_table(self) -> bool:
        """Whether readers of the format need the file itself, and not a stream."""
        return self in (FileFormat.PARQUET, FileFormat.ARROW, FileFormat.HDF5)


_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), FileFormat.LINES),
    ".csv": FileFormat.CSV,
    **dict.fromkeys((".tsv", ".tab"), FileFormat.TSV),
    ".parquet": FileFormat.PARQUET,
    **dict.fromkeys((".arrow", ".feather"), FileFormat.ARROW),
    **dict.fromkeys((".h5", ".hdf5"), FileFormat.HDF5),
}
_MAGIC = {b"PAR1": FileFormat.PARQUET, b"\x89HDF\r\n\x1a\n": FileFormat.HDF5, ARROW_FILE: FileFormat.ARROW}
_FOREIGN = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"RIFF": "a RIFF file (WebP, WAV)",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive (also .xlsx, .docx, .npz and torch checkpoints are such)",
    b"PK\x05\x06": "an empty zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\xfd7zXZ\0": "a file packed by xz",
    b"BZh": "a file packed by bzip2",
    b"\x04\x22\x4d\x18": "a file packed by lz4",
    b"GGUF": "a GGUF model",
    b"\x7fELF": "an ELF binary",
    b"SQLite format 3\0": "an SQLite database",
    b"\x93NUMPY": "a NumPy array",
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"FEA1": "a Feather file of version 1 (write it again as version 2)",
    **{bytes((0x80, n)): "a Python pickle, which is not read" for n in range(2, 6)},
    b"\xff\xfe": "text in UTF-16 (make it UTF-8: iconv -f utf-16 -t utf-8)",
    b"\xfe\xff": "text in UTF-16 (make it UTF-8: iconv -f utf-16 -t utf-8)",
    b"{\0": "text in UTF-16 (make it UTF-8: iconv -f utf-16le -t utf-8)",
    **dict.fromkeys((GZIP, *ZSTD), "a file that is packed twice"),
}


def format_of(head: bytes, path: str) -> FileFormat:
    """Return the format of a file.

    Args:
        head: Its first bytes, unpacked.
        path: Its path, or what is given in place of one.

    Raises:
        UserError: It is none that holds prompts.
    """
    named = format_of_name(path)
    for magic, found in _MAGIC.items():
        if head.startswith(magic):
            return found
    if head.startswith(ARROW_STREAM) and 0 < int.from_bytes(head[4:8], "little") < 1 << 30:
        return FileFormat.ARROW
    if seems := _foreign(head):
        raise _refused(path, seems)
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:_TEXT_BYTES]
    if not text:
        return named or FileFormat.LINES
    if found_json := _json(text, named):
        return found_json
    if _is_binary(text):
        if named and named.is_table:
            return named  # an HDF5 file may begin with anything; its reader says what is wrong
        raise _refused(path, "binary data of no known format")
    if named and not named.is_table:
        return named
    line = text.split(b"\n", 1)[0]
    if b"\t" in line or b"," in line:
        return FileFormat.TSV if b"\t" in line else FileFormat.CSV
    raise _refused(path, "plain text")


def format_of_name(path: str) -> FileFormat | None:
    """Return the format that the ending of a name stands for, or None."""
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    return next((found for suffix, found in _SUFFIXES.items() if name.endswith(suffix)), None)


def _json(text: bytes, named: FileFormat | None) -> FileFormat | None:
    """Return LINES or ARRAY if a text begins as JSON does."""
    rest = text[1:].lstrip()
    if text[:1] == b"[":
        return FileFormat.ARRAY if rest[:1] in (b"{", b"]", b"") else FileFormat.LINES
    if text[:1] == b"{" and (named not in (FileFormat.CSV, FileFormat.TSV) or rest[:1] == b'"'):
        return FileFormat.LINES
    return None


def _foreign(head: bytes) -> str | None:
    """Return what a file is that is known and holds no prompts, or None."""
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            return what
    if head[257:262] == b"ustar":
        return "a tar archive"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32 and b"\0" in head[:8]:
        return "a safetensors file"
    return "a video or audio file (MP4)" if head[4:8] == b"ftyp" else None


def _is_binary(text: bytes) -> bool:
    """Return whether a text has characters that texts do not have."""
    controls = sum(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in text)
    return b"\0" in text or 10 * controls > len(text)


def _refused(path: str, seems: str) -> UserError:
    return UserError(f"prompt file {printable(path)}: {EXPECTED}, got what seems to be {seems}")
