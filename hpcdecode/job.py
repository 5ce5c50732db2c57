"""What to run: one validated, frozen description, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from glob import has_magic
from pathlib import Path

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.sampling.params import SamplingParams

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
SETTINGS = "hpcdecode.toml"
STDIN = "-"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A generation job. None means auto: it is resolved before the job starts, and what it became is printed."""

    prompts: tuple[str, ...]  # files, patterns, or - for standard input
    model: str
    output: str
    params: SamplingParams = SamplingParams()
    dtype: str | None = None
    kv_dtype: str | None = None
    batch: int | None = None  # B, sequences decoding at once in the steady state
    period: int | None = None  # F, steps between injections
    lanes: int | None = None  # mini-batches in flight
    prefill_tokens: int = 512  # most prompt tokens that a lane prefills in one step
    s_ranks: int | None = None
    kv_memory: int | None = None  # bytes per R-rank
    overwrite: bool = False
    prompt_column: str | None = None
    limit: int | None = None  # rows to take at most
    max_errors: int | None = None  # rows that may be unusable before the job stops
    prefix_sharing: bool = True  # prefill what several prompts begin with once
    checkpoint_every: float = 5.0  # seconds between commits of what is finished and what is in flight

    def check(self) -> Job:
        """Return self, or raise UserError naming the value that is out of range."""
        if len(self.prompts) == 0:
            raise UserError("expected at least one prompt file, got none", everywhere=True)
        if not 0 < self.checkpoint_every < float("inf"):
            raise UserError(f"--checkpoint-every: expected seconds > 0, got {self.checkpoint_every}", everywhere=True)
        if self.max_errors is not None and self.max_errors < 0:
            raise UserError(f"--max-errors: expected an integer >= 0, got {self.max_errors}", everywhere=True)
        for name in ("batch", "period", "lanes", "prefill_tokens", "s_ranks", "kv_memory", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')}: expected an integer >= 1, got {value}", everywhere=True)
        return self


def default_output(prompts: Seq[str]) -> str:
    """`prompts.jsonl.gz` -> `prompts.h5`, in the working directory; UserError where no name follows from the input."""
    name = Path(prompts[0]).name.removesuffix(".gz").removesuffix(".zst")
    if len(prompts) > 1 or prompts[0] == STDIN or has_magic(name):
        raise UserError("expected -o OUT.h5 for several prompt files or standard input, got none", everywhere=True)
    return str(Path(name).with_suffix(".h5"))


def find_model(flag: str | None, environment: Mapping[str, str]) -> str:
    """The model directory from --model, HPCDECODE_MODEL or hpcdecode.toml, in this order."""
    model = flag or environment.get("HPCDECODE_MODEL") or _settings().get("model")
    if model is None:
        raise UserError(
            "no model given: expected --model DIR, the environment variable HPCDECODE_MODEL, or a line "
            f'model = "DIR" in {SETTINGS} in the working directory, and found none of them '
            "(--model demo is the model that ships with hpcdecode)",
            everywhere=True,
        )
    if not isinstance(model, str):
        raise UserError(f"{SETTINGS}: model: expected a string, got {model!r}", everywhere=True)
    return str(_demo()) if model == "demo" else model


def _settings() -> dict:
    try:
        with open(SETTINGS, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{SETTINGS}: expected a readable TOML file: {error}", everywhere=True) from error


def demo_directory() -> Path:
    """Where the demo job lies: in the installed package, or in the source tree."""
    here = Path(__file__).parent
    installed = here / "demo"
    return installed if installed.is_dir() else here.parent / "jobs" / "demo"


def _demo() -> Path:
    return demo_directory() / "model"
