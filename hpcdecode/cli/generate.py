"""`hpcdecode generate`: flags become a Job."""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.cli.job_file import read_job_file
from hpcdecode.config import (
    DEVICES,
    DTYPES,
    KV_DTYPES,
    PARTITIONS,
    R_DEVICES,
    SCHEDULES,
    WEIGHTS,
    Job,
    Shard,
    default_output,
    find_model,
    parse_bytes,
)
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.ranks import launch
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.signals import END_TIME, Signals

_DEFAULTS = {f.name: f.default for kind in (Job, SamplingParams) for f in msgspec.structs.fields(kind)}
_Switch = argparse.BooleanOptionalAction  # --no-... takes back what a job file says


def _add_generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text for the rows of a prompt file",
        description="Generate text for every row of the prompt files, into one HDF5 file. The same command again "
        "continues an interrupted job. Exit code: 0 all rows done, 3 done but for rows under /errors, 75 stopped with "
        "rows left to be started again (SIGUSR1, end of time), 128 + signal stopped, 2 the job cannot run as asked, "
        "1 failed.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_job(parser)
    _add_rows(parser.add_argument_group("rows"))
    _add_time(parser.add_argument_group("time"))
    _add_sampling(parser.add_argument_group("sampling (a row's own fields win)"))
    _add_size(parser.add_argument_group("size (auto if not given)"))
    parser.set_defaults(run=_generate, connect=launch.world, signals=Signals())


def _add_job(parser) -> None:
    add = parser.add_argument
    add(
        "prompts",
        metavar="PROMPTS",
        nargs="*",
        help="files, patterns or - (stdin): .jsonl, .jsonl.gz, .jsonl.zst with prompt, prompt_token_ids or messages a "
        "row, or requests of the OpenAI batch format; .parquet; .h5",
    )
    add("--job", metavar="FILE", help="TOML with values for these flags, under their names with underscores; flags win")
    add("--model", metavar="DIR", help="Hugging Face model directory, or demo (HPCDECODE_MODEL, hpcdecode.toml)")
    add("-o", "--output", metavar="OUT.h5", help="results (the prompt file's name with .h5)")
    add("--trace", metavar="OUT.json", help="write what every rank did when, for Perfetto or chrome://tracing")
    add("--overwrite", action="store_true", help="start anew in place of what the output holds")


def _add_rows(group) -> None:
    add = group.add_argument
    add("--prompt-column", metavar="NAME", help="where rows have their prompt (prompt); in HDF5 a dataset's path")
    add("--limit", type=int, metavar="N", help="take the first N rows only")
    add(
        "--shard",
        type=_parsed(Shard.parse),
        metavar="I/N",
        help="take those rows whose line modulo N is I; see hpcdecode merge",
    )
    add("--max-errors", type=int, metavar="N", help="stop when more than N rows cannot be used (never)")
    add("--fail-fast", dest="max_errors", action="store_const", const=0, help="stop at the first of them")


def _add_time(group) -> None:
    add = group.add_argument
    help = f"between commits of finished rows and of those in flight ({_DEFAULTS['checkpoint_every']})"
    add("--checkpoint-every", type=float, metavar="SECONDS", help=help)
    help = f"stop so long before the batch job's time is over, {END_TIME}; 0 never ({_DEFAULTS['drain_before']})"
    add("--drain-before", type=float, metavar="SECONDS", help=help)
    help = f"end the job where a rank makes no progress for so long; 0 never ({_DEFAULTS['stall_timeout']})"
    add("--stall-timeout", type=float, metavar="SECONDS", help=help)
    add("--survive", action=_Switch, help="go on without R-ranks that are lost (Open MPI 5, mpiexec --with-ft ulfm)")


def _add_sampling(group) -> None:
    add, default = group.add_argument, _DEFAULTS
    add("--n", type=int, metavar="N", help=f"samples of every row ({default['n']})")
    add("--max-tokens", type=int, metavar="N", help=f"({default['max_tokens']})")
    add("--min-tokens", type=int, metavar="N", help=f"before anything stops ({default['min_tokens']})")
    add("--temperature", type=float, metavar="T", help=f"0 is greedy ({default['temperature']})")
    add("--top-k", type=int, metavar="K", help=f"0 for all tokens ({default['top_k']})")
    add("--top-p", type=float, metavar="P", help=f"({default['top_p']})")
    add("--min-p", type=float, metavar="P", help=f"as a share of the greatest ({default['min_p']})")
    for name, what in (
        ("presence", "once for a generated token"),
        ("frequency", "each time it was generated"),
        ("repetition", "a factor, for the prompt's tokens too"),
    ):
        add(f"--{name}-penalty", type=float, metavar="X", help=f"{what} ({default[f'{name}_penalty']})")
    add("--logit-bias", type=_biases, metavar="ID:X[,ID:X...]", help="added to the logits of token ids")
    add("--bad-words", action="append", metavar="TEXT", help="never generated; may be given again")
    add("--seed", type=int, metavar="S", help=f"({default['seed']})")
    add("--ignore-eos", action=_Switch, help="go on after end-of-sequence tokens")
    add("--stop-token-ids", type=_ids, metavar="ID[,ID...]", help="token ids that end a sequence")
    add("--stop", action="append", metavar="TEXT", help="ends a sequence; may be given again")
    add("--include-stop-str-in-output", action=_Switch, help="leave the stop string in the text")
    add("--skip-special-tokens", action=_Switch, help="in the text (yes)")
    help = "what texts follow, as in a row: JSON, or a file of it with json, regex, choice or grammar"
    add("--structured-outputs", type=_object, metavar="JSON", help=help)
    add("--truncate-prompt-tokens", type=int, metavar="N", help="keep a prompt's last N; -1 for what there is room for")
    add("--beam-width", type=int, metavar="W", help="search for the W likeliest continuations, the row's samples")
    add("--length-penalty", type=float, metavar="X", help=f"of beams ({default['length_penalty']})")
    add("--logprobs", type=int, metavar="K", help="keep tokens' log-probabilities, and those of the K most likely ones")
    add("--prompt-logprobs", type=int, metavar="K", help="the same of the prompts' tokens")


def _add_size(group) -> None:
    add = group.add_argument
    add("--dtype", choices=DTYPES, help="of weights and activations")
    add("--weights", choices=WEIGHTS, help="of projections: rounded, and their inputs before each product (as --dtype)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the KV cache (as --dtype)")
    add("--device", choices=DEVICES, help="of the S-ranks (cuda where they see a GPU)")
    add("--compile", action=_Switch, help="slices on GPUs, by torch's compiler: a longer start, and fewer kernels")
    help = f"of the R-ranks ({_DEFAULTS['r_device']}); auto: a GPU where one is left for the rank, else its CPUs; "
    help += "in one process with cuda for both, the KV cache is the GPU's"
    add("--r-device", choices=R_DEVICES, help=help)
    help = "activations from GPU to GPU, where all ranks compute on some and MPI takes their memory (yes)"
    add("--gpu-mpi", action=_Switch, help=help)
    add("--batch", type=_count, metavar="B", help="sequences decoding at once in the steady state")
    add("--period", type=_count, metavar="F", help="steps between two injections")
    add("--schedule", choices=SCHEDULES, help=f"when rows enter ({_DEFAULTS['schedule']})")
    add("--load-limit", type=_count, metavar="TOKENS", help="that a step may attend to under load-control")
    help = "of hpcdecode calibrate on as many ranks: batch, period and lanes are the planner's, for many rows"
    add("--profile", metavar="FILE", help=help)
    add("--lanes", type=_count, metavar="L", help="mini-batches in flight per S-rank (2, or 1 in one process)")
    help = f"most prompt tokens a step of a lane ({prefill_limit(True)}, or {prefill_limit(False)} in one process)"
    add("--prefill-tokens", type=int, metavar="N", help=help)
    add("--prefix-sharing", action=_Switch, help="prefill what several prompts begin with once (yes)")
    add("--partition", choices=PARTITIONS, help=f"what R-ranks share out ({_DEFAULTS['partition']})")
    help = f"pieces of an R-rank's work in a layer, attended as they arrive ({_DEFAULTS['overlap']})"
    add("--overlap", type=int, metavar="N", help=help)
    add("--s-ranks", type=int, metavar="K", help="ranks that hold weights; the others hold KV caches (1)")
    size = _parsed(parse_bytes)
    add("--kv-memory", type=size, metavar="SIZE", help="KV cache of an R-rank, such as 64G")
    help = "that a rank takes of a GPU at most, KV cache included (what is free)"
    add("--gpu-memory", type=size, metavar="SIZE", help=help)


def _generate(options: argparse.Namespace, comm) -> int:
    given = vars(options)  # no flag has a default
    values = {**(read_job_file(options.job) if "job" in given else {}), **given}
    try:
        params = _pick(SamplingParams, values).check()
    except RowProblem as problem:
        raise UserError(f"--{problem}".replace("_", "-", 2), everywhere=True) from None
    if "prompts" not in values:
        raise UserError("expected at least one prompt file, or a job file that names some, got none", everywhere=True)
    values["model"] = find_model(values.get("model"), os.environ)
    values["output"] = values.get("output") or default_output(values["prompts"], values.get("shard"))
    job = _pick(Job, {**values, "params": params}).check()
    gc.disable()  # until generate() has what stays: collections would look at all of it again and again
    try:
        from hpcdecode.generate import generate
    except (ImportError, MemoryError) as error:
        expected = "expected the libraries that hpcdecode needs to load"
        raise UserError(
            f"{expected}: {first_line(error)}; give the process more memory, or install them anew"
        ) from error
    return generate(job, comm, signals=options.signals)


def _pick(kind: type, values: dict):
    """The struct `kind` of those values that are its fields."""
    own = {name: values[name] for name in kind.__struct_fields__ if name in values}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in own.items()})


def _count(text: str) -> int | None:
    """`auto` is None."""
    return None if text == "auto" else int(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = (part.split(":") for part in text.split(","))
    return {int(token): float(bias) for token, bias in pairs}


def _object(text: str) -> dict:
    """A JSON object, or that of a file."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object or a file of one: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {value!r}")
    return value


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """As the type of a flag, a parser whose ValueError says what was expected."""

    def of(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return of


COMMANDS = (_add_generate,)
