"""What to run: one validated, frozen description, the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
R_DEVICES = (*DEVICES, "auto")
PARTITIONS = ("request", "head")
SCHEDULES = ("fixed-f", "load-control", "static", "fifo")
WEIGHTS = ("int8",)
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
_CHOICES = {
    "dtype": DTYPES,
    "weights": WEIGHTS,
    "kv_dtype": KV_DTYPES,
    "device": DEVICES,
    "r_device": R_DEVICES,
    "partition": PARTITIONS,
    "schedule": SCHEDULES,
}
_MOST = {  # beyond these a job would take memory or time that no machine has
    "batch": 1 << 20,
    "period": 1 << 24,
    "lanes": 64,
    "prefill_tokens": 1 << 17,
    "overlap": 256,
}
SETTINGS = "hpcdecode.toml"
STDIN = "-"
DEMO = "demo"  # the model that ships with hpcdecode
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A model and how it is run. None means auto: it is resolved before the work, and what it became is printed."""

    model: str
    dtype: str | None = None
    weights: str | None = None  # of projections; None: as dtype
    kv_dtype: str | None = None
    device: str | None = None  # of S-ranks: cuda where they see a GPU
    compile: bool = False  # slices on GPUs, by torch's compiler
    gpu_mpi: bool = True  # activations from GPU to GPU, where all ranks compute on some and MPI takes their memory
    r_device: str = "cpu"  # of R-ranks; auto: a GPU where one is left for the rank
    batch: int | None = None  # B, sequences decoding at once in the steady state
    period: int | None = None  # F, steps between injections
    lanes: int | None = None  # mini-batches in flight
    schedule: str = "fixed-f"  # when rows enter
    load_limit: int | None = None  # W_lim of load-control: tokens that all sequences attend to in a step
    prefill_tokens: int | None = None  # most that a lane prefills in one step
    prefix_sharing: bool = True  # prefill what several prompts begin with once
    partition: str = "request"  # of the attention over R-ranks
    overlap: int = 1  # pieces of an R-rank's work in a layer, each attended as soon as it has come
    s_ranks: int | None = None
    kv_memory: int | None = None  # bytes per R-rank
    gpu_memory: int | None = None  # bytes of a GPU that a rank takes at most, KV cache included; None: what is free
    survive: bool = False  # the loss of R-ranks, where MPI can

    def check(self) -> Self:
        """Return self, or raise UserError naming the value that is out of range."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                expected = f"one of {', '.join(choices)}"
                raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {value!r}", everywhere=True)
        if self.r_device != "cpu" and self.kv_dtype == "int4":
            raise UserError(
                f"--r-device {self.r_device}: expected --kv-dtype float32, float16, bfloat16 or int8, got int4",
                everywhere=True,
            )
        self._require_counts(*_MOST, "s_ranks", "kv_memory", "load_limit", "gpu_memory")
        return self

    def _require_counts(self, *names: str) -> None:
        for name in names:
            value, most = getattr(self, name), _MOST.get(name)
            if value is not None and not 1 <= value <= (most or value):
                expected = f"in [1, {most}]" if most else ">= 1"
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag}: expected an integer {expected}, got {value}", everywhere=True)


class Shard(msgspec.Struct, frozen=True):
    """One of `count` jobs that share the rows of their prompt files: those whose line modulo `count` is `index`."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`0/4` to `3/4`. Raises ValueError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if not match or not int(match[1]) < int(match[2]):
            raise ValueError(f"expected I/N with 0 <= I < N, such as 0/4, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, line: int) -> bool:
        return line % self.count == self.index


class Job(EngineOptions, frozen=True, kw_only=True):
    """A generation job of the command line: what an engine is to do, and where its results go."""

    prompts: tuple[str, ...]  # files, patterns, or - for standard input
    output: str
    params: SamplingParams = SamplingParams()
    overwrite: bool = False
    prompt_column: str | None = None
    limit: int | None = None  # rows to take at most, of all shards together
    shard: Shard | None = None  # of the rows; None for all
    max_errors: int | None = None  # rows that may be unusable before the job stops
    profile: str | None = None  # of calibrate: what B, F and lanes are chosen by
    trace: str | None = None  # file for a trace of all ranks
    checkpoint_every: float = 5.0  # seconds between commits of what is finished and what is in flight
    stall_timeout: float = 300.0  # seconds that a rank may be without progress; 0 for ever
    drain_before: float = 120.0  # seconds before the end of the batch job's time; 0 never

    def check(self) -> Self:
        """Return self, or raise UserError naming the value that is out of range."""
        if len(self.prompts) == 0:
            raise UserError("expected at least one prompt file, got none", everywhere=True)
        if not 0 < self.checkpoint_every < float("inf"):
            raise UserError(f"--checkpoint-every: expected seconds > 0, got {self.checkpoint_every}", everywhere=True)
        for name in ("drain_before", "stall_timeout"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')}: expected seconds >= 0, got {value}", everywhere=True)
        if self.max_errors is not None and self.max_errors < 0:
            raise UserError(f"--max-errors: expected an integer >= 0, got {self.max_errors}", everywhere=True)
        self._require_counts("limit")
        return super().check()


def parse_bytes(text: str) -> int:
    """`512M` or `64G` as bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+)([kmgt]?)(i?b)?", text.strip().lower())
    if not match:
        raise ValueError(f"expected a size such as 512M or 64G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def default_output(prompts: Sequence[str], shard: Shard | None = None) -> str:
    """`prompts.jsonl.gz` -> `prompts.h5`, of a shard `prompts.0-of-4.h5`, in the working directory.

    UserError where no name follows from the input.
    """
    name = Path(prompts[0]).name.removesuffix(".gz").removesuffix(".zst")
    if len(prompts) > 1 or prompts[0] == STDIN or has_magic(name):
        raise UserError("expected -o OUT.h5 for several prompt files or standard input, got none", everywhere=True)
    return str(Path(name).with_suffix(f".{shard.index}-of-{shard.count}.h5" if shard else ".h5"))


def find_model(flag: str | None, environment: Mapping[str, str]) -> str:
    """The model directory from --model, HPCDECODE_MODEL or hpcdecode.toml, in this order."""
    model = flag or environment.get("HPCDECODE_MODEL")
    if model is None and Path(SETTINGS).exists():
        model = read_toml(SETTINGS).get("model")
    if model is None:
        raise UserError(
            "no model given: expected --model DIR, the environment variable HPCDECODE_MODEL, or a line "
            f'model = "DIR" in {SETTINGS} in the working directory, and found none of them '
            "(--model demo is the model that ships with hpcdecode)",
            everywhere=True,
        )
    if not isinstance(model, str):
        raise UserError(f"{SETTINGS}: model: expected a string, got {model!r}", everywhere=True)
    return str(_demo()) if model == DEMO else model


def read_toml(path: str) -> dict[str, Any]:
    """Raises UserError where the file cannot be read as TOML."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError, as is invalid UTF-8
        raise UserError(f"{path}: expected a readable TOML file: {error}", everywhere=True) from error


def demo_directory() -> Path:
    """Where the demo job lies: in the installed package, or in the source tree."""
    here = Path(__file__).parent
    installed = here / "demo"
    return installed if installed.is_dir() else here.parent / "jobs" / "demo"


def _demo() -> Path:
    return demo_directory() / "model"
