"""Models of the Hugging Face hub that are in its local cache, found by the layout of the cache's files. No network."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from hpcdecode.errors import UserError

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w.][\w./-]*))?", re.ASCII)
MOST_CHARACTERS = 255  # of a name, as of a file's
HUB_FOLDER = "models--"  # begin of the name of a model's folder in the cache
MAIN = "main"
INDEX, WEIGHTS, GGUF = "model.safetensors.index.json", "*.safetensors", ".gguf"
READ = (".json", ".safetensors", ".jinja", ".txt", ".model", GGUF)  # endings of the files that a job may read
PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf")  # the end of the names of all parts but the first
MOST_INDEX_BYTES = 512 << 20
_COMMIT = re.compile(r"\w{1,64}")
_SHOWN = 5


def hub_cache() -> Path:
    """Return the folder of the hub's cache: HF_HUB_CACHE, or hub in HF_HOME or ~/.cache/huggingface."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = os.path.join(os.environ.get("HF_HOME") or os.path.join(user, "huggingface"), "hub")
    return Path(os.path.expandvars(given)).expanduser()


def in_hub_cache(model: str) -> bool:
    """Return whether a name, or what could be a path, is that of a model in the hub's cache."""
    match = HUB_ID.fullmatch(model)
    return match is not None and (hub_cache() / (HUB_FOLDER + match["name"].replace("/", "--")) / "snapshots").is_dir()


def from_hub(model: str, *, weights: bool = True) -> str | None:
    """Return the path of a model of the hub in the local cache.

    Args:
        model: What the user gave: `org/name` or `org/name@revision`, a branch, tag or commit.
        weights: Whether the files of the weights must be there.

    Returns:
        The snapshot's directory, or its file if it is one GGUF file. None if `model` exists as a path or is no such
        name, and for names without `org/` that the cache does not have.

    Raises:
        UserError: The cache lacks the model, its revision, or some of its files.
    """
    match = HUB_ID.fullmatch(model)
    if match is None or len(model) > MOST_CHARACTERS or os.path.lexists(model):
        return None
    name, revision = match["name"], match["revision"]
    folder = hub_cache() / (HUB_FOLDER + name.replace("/", "--"))
    if not (folder / "snapshots").is_dir():
        if "/" not in name or name.endswith(GGUF):
            return None
        raise UserError(
            f"model {model}: expected a directory, or a model in the cache of the Hugging Face hub ({hub_cache()}), "
            f"found neither: {_download(name, revision)}"
        )
    snapshot = _snapshot(folder, model, name, revision)
    _require_whole(snapshot, f"model {model} in {folder}", _download(name, revision), weights)
    file = _gguf_file(snapshot, model)
    return str(file or snapshot)


def _download(name: str, revision: str | None) -> str:
    return f"hf download {name}" + (f" --revision {revision}" if revision else "")


def _snapshot(folder: Path, model: str, name: str, revision: str | None) -> Path:
    """Return the directory of a revision, or raise UserError with those that there are."""
    wanted = revision or MAIN
    ref, commit = folder / "refs" / wanted, wanted
    if ".." in wanted.split("/"):
        raise UserError(f"model {model}: expected a branch, a tag or a commit after @, got {wanted}")
    if ref.is_file():
        with open(ref, errors="replace") as file:
            commit = file.read(256).strip()
    snapshot = folder / "snapshots" / commit
    if _COMMIT.fullmatch(commit) and snapshot.is_dir():
        return snapshot
    refs = [str(path.relative_to(folder / "refs")) for path in sorted((folder / "refs").rglob("*")) if path.is_file()]
    commits = sorted(path.name for path in (folder / "snapshots").iterdir())
    known = [each for each in refs + commits if each != wanted]
    instead = f", or use --model {name}@{known[0]}" if known else ""
    raise UserError(
        f"model {model}: expected revision {wanted} in {folder}, found {', '.join(known[:_SHOWN]) or 'none'}: "
        f"{_download(name, revision)}{instead}"
    )


def _require_whole(snapshot: Path, model: str, download: str, weights: bool) -> None:
    """Raise UserError if files are missing from a snapshot, as after a download that was interrupted."""
    entries = sorted(path for path in snapshot.iterdir() if path.suffix in READ)
    lost = [path.name for path in entries if not path.exists()]  # links whose targets are gone
    if lost:
        raise _incomplete(model, f"the content of {_some(lost)}", download)
    names = {path.name for path in entries}
    if "config.json" not in names and not any(name.endswith(GGUF) for name in names):
        raise _incomplete(model, "config.json", download)
    if not weights:
        return
    missing = [name for name in _indexed(snapshot) if not os.path.isfile(snapshot / name)]
    if missing:
        raise _incomplete(model, _some(missing), download)
    if not any(name.endswith((".safetensors", GGUF)) for name in names) and not any(snapshot.glob("*.bin")):
        raise _incomplete(model, "the weights", download)


def _incomplete(model: str, lacks: str, download: str) -> UserError:
    return UserError(f"{model}: expected a whole download, this one lacks {lacks}: {download}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN]):.500}{more}"


def _indexed(snapshot: Path) -> list[str]:
    """Return the names of the files that the index of the weights names; a damaged index is judged by its reader."""
    index = snapshot / INDEX
    try:
        if not index.is_file() or index.stat().st_size > MOST_INDEX_BYTES:
            return []
        named = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({name for name in named if isinstance(name, str) and "\0" not in name})
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []


def _gguf_file(snapshot: Path, model: str) -> Path | None:
    """Return the GGUF file of a snapshot that has no model in another form, or None.

    Raises:
        UserError: If there are several.
    """
    if any(snapshot.glob(WEIGHTS)):
        return None
    files = sorted(path for path in snapshot.rglob(f"*{GGUF}") if not PART.search(path.name))
    if len(files) > 1:
        names = _some([str(path.relative_to(snapshot)) for path in files])
        raise UserError(f"model {model}: expected one GGUF file, got {names}: give one: --model {files[0]}")
    return files[0] if files else None
