"""What to run: one validated, frozen description, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A generation job. None means auto: it is resolved before the job starts, and what it became is printed."""

    prompts: str
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

    def check(self) -> Job:
        """Return self, or raise UserError naming the value that is out of range."""
        for name in ("batch", "period", "lanes", "prefill_tokens", "s_ranks", "kv_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')}: expected an integer >= 1, got {value}", everywhere=True)
        return self


def default_output(prompts: str) -> str:
    """`prompts.jsonl` -> `prompts.h5`, in the working directory."""
    return Path(prompts).stem + ".h5"


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
