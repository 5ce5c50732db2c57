"""`hpcdecode generate`: from flags and a job file to a Job."""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hpcdecode.cli.arguments import add_verbosity, parsed
from hpcdecode.cli.job_file import read_job_file
from hpcdecode.config import (
    ADMISSIONS,
    DEVICES,
    DTYPES,
    EXCHANGES,
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
from hpcdecode.ranks.wishes import LAYOUTS, POOLS, ROUTES
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.signals import END_TIME, Signals

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.cli.arguments import Group, Subcommands

S = TypeVar("S", bound=msgspec.Struct)
_DEFAULTS = {f.name: f.default for kind in (Job, SamplingParams) for f in msgspec.structs.fields(kind)}
_Switch = argparse.BooleanOptionalAction  # --no-... overrides a job file


def _add_generate(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text for the rows of a prompt file",
        description="Generate text for every row of the prompt files, into one HDF5 file. The same command again "
        "continues an interrupted job. Exit codes: 0 if all rows are done; 3 if all are done but those under /errors; "
        "75 if the job stopped with rows left (SIGUSR1, end of its time) and is to be started again; 128 + n if signal "
        "n stopped it; 2 if it cannot run as asked; 1 if it failed.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_job(parser)
    add_verbosity(parser)
    _add_rows(parser.add_argument_group("rows"))
    _add_time(parser.add_argument_group("time"))
    _add_sampling(parser.add_argument_group("sampling (a row's own fields win)"))
    _add_size(parser.add_argument_group("size (auto if not given)"))
    parser.set_defaults(run=_generate, connect=launch.world, signals=Signals())


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "prompts",
        metavar="PROMPTS",
        nargs="*",
        help="prompt files, patterns, or - for standard input. Formats: .jsonl, .jsonl.gz or .jsonl.zst, whose rows "
        "have prompt, prompt_token_ids or messages, or are requests of the OpenAI batch format; .parquet; .h5",
    )
    help = "TOML file with values for these flags, named with underscores; flags override it"
    add("--job", metavar="FILE", help=help)
    help = (
        "directory of a Hugging Face model, a GGUF file, or demo (default: HPCDECODE_MODEL, or model in hpcdecode.toml)"
    )
    add("--model", metavar="DIR", help=help)
    add("--lora", metavar="DIR", help="directory of a PEFT adapter (LoRA) that is merged into the weights")
    add("-o", "--output", metavar="OUT.h5", help="file for the results (default: the prompt file's name with .h5)")
    help = "write a timeline of all ranks to this file, for Perfetto or chrome://tracing"
    add("--trace", metavar="OUT.json", help=help)
    add("--overwrite", action="store_true", help="replace existing results instead of continuing them")


def _add_rows(group: Group) -> None:
    add = group.add_argument
    help = "name of the column that holds the prompts, or path of the dataset in HDF5 (default: prompt)"
    add("--prompt-column", metavar="NAME", help=help)
    add("--limit", type=int, metavar="N", help="take only the first N rows")
    help = "take only rows whose line modulo N is I; hpcdecode merge joins the results"
    add("--shard", type=parsed(Shard.parse), metavar="I/N", help=help)
    help = "stop when more than N rows cannot be used (default: never)"
    add("--max-errors", type=int, metavar="N", help=help)
    add(
        "--fail-fast",
        dest="max_errors",
        action="store_const",
        const=0,
        help="stop at the first row that cannot be used",
    )


def _add_time(group: Group) -> None:
    add = group.add_argument
    help = f"save finished rows, and the tokens of those in flight, this often ({_DEFAULTS['checkpoint_every']})"
    add("--checkpoint-every", type=float, metavar="SECONDS", help=help)
    help = f"stop this long before the end of the batch job, {END_TIME}; 0 never stops ({_DEFAULTS['drain_before']})"
    add("--drain-before", type=float, metavar="SECONDS", help=help)
    help = f"end the job if a rank makes no progress for this long; 0 never ends it ({_DEFAULTS['stall_timeout']})"
    add("--stall-timeout", type=float, metavar="SECONDS", help=help)
    help = "go on if R-ranks are lost; needs Open MPI 5 and mpiexec --with-ft ulfm"
    add("--survive", action=_Switch, help=help)


def _add_sampling(group: Group) -> None:
    add, default = group.add_argument, _DEFAULTS
    add("--n", type=int, metavar="N", help=f"number of samples of every row ({default['n']})")
    add("--max-tokens", type=int, metavar="N", help=f"most tokens to generate ({default['max_tokens']})")
    help = f"tokens to generate before anything may end the text ({default['min_tokens']})"
    add("--min-tokens", type=int, metavar="N", help=help)
    add("--temperature", type=float, metavar="T", help=f"temperature; 0 is greedy ({default['temperature']})")
    help = f"sample from the K most likely tokens; 0 for all of them ({default['top_k']})"
    add("--top-k", type=int, metavar="K", help=help)
    help = f"sample from the most likely tokens whose probabilities add up to P ({default['top_p']})"
    add("--top-p", type=float, metavar="P", help=help)
    help = f"drop tokens less likely than P times the most likely one ({default['min_p']})"
    add("--min-p", type=float, metavar="P", help=help)
    for name, what in (
        ("presence", "lower the logits of generated tokens by X"),
        ("frequency", "lower the logits of tokens by X for each time they were generated"),
        ("repetition", "divide the logits of generated and prompt tokens by X, or multiply if negative"),
    ):
        add(f"--{name}-penalty", type=float, metavar="X", help=f"{what} ({default[f'{name}_penalty']})")
    add("--logit-bias", type=_biases, metavar="ID:X[,ID:X...]", help="add X to the logit of the token ID")
    add("--bad-words", action="append", metavar="TEXT", help="never generate this text; may be given several times")
    add("--seed", type=int, metavar="S", help=f"seed of the random numbers ({default['seed']})")
    add("--ignore-eos", action=_Switch, help="continue after end-of-sequence tokens")
    add("--stop-token-ids", type=_ids, metavar="ID[,ID...]", help="end the text at these tokens")
    add("--stop", action="append", metavar="TEXT", help="end the text at this string; may be given several times")
    add("--include-stop-str-in-output", action=_Switch, help="keep the stop string in the text")
    add("--skip-special-tokens", action=_Switch, help="leave special tokens out of the text (default: yes)")
    help = "constrain the text: a JSON object with json, regex, choice or grammar, or a file that holds one"
    add("--structured-outputs", type=_object, metavar="JSON", help=help)
    help = "keep only the last N tokens of a prompt; -1 for as many as the context can hold"
    add("--truncate-prompt-tokens", type=int, metavar="N", help=help)
    help = "search for the W most likely continuations, which become the row's samples"
    add("--beam-width", type=int, metavar="W", help=help)
    help = f"exponent of the length by which a beam's score is divided ({default['length_penalty']})"
    add("--length-penalty", type=float, metavar="X", help=help)
    help = "record the log-probability of every token, and those of the K most likely ones"
    add("--logprobs", type=int, metavar="K", help=help)
    help = "record the same for the tokens of the prompt"
    add("--prompt-logprobs", type=int, metavar="K", help=help)


def _add_size(group: Group) -> None:
    add = group.add_argument
    add("--dtype", choices=DTYPES, help="data type of weights and activations")
    help = "what the projections' weights are in memory: auto (default), what the checkpoint has if that changes no "
    help += "result, else --dtype; a data type, the same as --dtype; or on CPUs int8, which rounds activations too, "
    help += "int4, mxfp4 or fp8, expanded as they are multiplied"
    add("--weights", choices=WEIGHTS, help=help)
    add("--kv-dtype", choices=KV_DTYPES, help="data type of the KV cache (default: --dtype)")
    add("--device", choices=DEVICES, help="device of the S-ranks (default: cuda if they see a GPU)")
    help = "compile slices on GPUs with torch's compiler: a longer start, fewer kernels"
    add("--compile", action=_Switch, help=help)
    help = f"device of the R-ranks; auto takes a GPU where one is free, else the CPU ({_DEFAULTS['r_device']}). "
    help += "A single process with cuda for both roles keeps the KV cache on its GPU"
    add("--r-device", choices=R_DEVICES, help=help)
    help = "send activations from GPU to GPU if all ranks compute on GPUs and MPI takes their memory (default: yes)"
    add("--gpu-mpi", action=_Switch, help=help)
    add("--batch", type=_count, metavar="B", help="sequences of an S-rank that decode at once in the steady state")
    add("--period", type=_count, metavar="F", help="steps between two injections of new rows")
    add("--schedule", choices=SCHEDULES, help=f"policy by which rows enter ({_DEFAULTS['schedule']})")
    help = (
        "reserve: a row enters when the KV cache has room for all of its max_tokens; optimistic: when it has room for "
    )
    help += (
        "the tokens that rows are expected to generate, by those that have ended; if it runs out, the youngest rows "
    )
    help += f"give up theirs and are prefilled again later, with the same results ({_DEFAULTS['admission']})"
    add("--admission", choices=ADMISSIONS, help=help)
    help = "most tokens that a step attends to under the schedule load-control"
    add("--load-limit", type=_count, metavar="TOKENS", help=help)
    help = "profile of hpcdecode calibrate, measured on as many ranks, from which the layout is chosen, and batch, "
    help += "period and lanes of a job of many rows"
    add("--profile", metavar="FILE", help=help)
    help = "lanes of an S-rank, each with a micro-batch in flight (default: 2, or 1 in a single process)"
    add("--lanes", type=_count, metavar="L", help=help)
    help = f"most prompt tokens in a step of a lane ({prefill_limit(True)}, or {prefill_limit(False)} in one process)"
    add("--prefill-tokens", type=int, metavar="N", help=help)
    help = "prefill a common beginning of several prompts once (default: yes)"
    add("--prefix-sharing", action=_Switch, help=help)
    help = f"unit by which attention is divided among R-ranks ({_DEFAULTS['partition']})"
    add("--partition", choices=PARTITIONS, help=help)
    help = f"parts of an R-rank's work in a layer, each attended to when it arrives ({_DEFAULTS['overlap']})"
    add("--overlap", type=int, metavar="N", help=help)
    help = "replicas: every rank holds the weights and the KV cache of its own rows; split: every rank holds one of "
    help += "the two; auto, the default, is split if some ranks have a GPU of their own and others do not, or if the "
    help += "weights do not fit on all, else replicas"
    add("--layout", choices=LAYOUTS, help=help)
    help = "ranks that hold the weights, while the others hold KV caches; implies --layout split (default: 1)"
    add("--s-ranks", type=int, metavar="K", help=help)
    help = "tensor parallelism: ranks that share the weights and attention heads of one model (default: as many as "
    help += "the weights need)"
    add("--tp", "--tensor-parallel-size", type=int, metavar="K", help=help)
    help = f"pipeline parallelism: stages of ranks, each of which has a run of layers ({_DEFAULTS['pp']})"
    add("--pp", "--pipeline-parallel-size", type=int, metavar="S", help=help)
    help = "expert parallelism: each expert of an MoE model is on one of the ranks of --tp, which otherwise have parts "
    help += "of every expert (default: no)"
    add("--ep", "--enable-expert-parallel", action=_Switch, help=help)
    help = f"whether all R-ranks serve every S-rank, or an even share of them each ({_DEFAULTS['pools']})"
    add("--pools", choices=POOLS, help=help)
    help = "fixed: one S-rank runs all slices of a lane; rotational: all S-ranks, each with the whole model, run them "
    help += f"in turn, which suits weights that take longer to read than to compute with ({_DEFAULTS['route']})"
    add("--route", choices=ROUTES, help=help)
    help = "how activations cross between ranks: in messages, or by one nonblocking collective a layer each way; auto, "
    help += "the default, takes messages within a host, and between hosts times both and keeps collectives unless they "
    help += "are slower"
    add("--exchange", choices=EXCHANGES, help=help)
    size = parsed(parse_bytes)
    add("--kv-memory", type=size, metavar="SIZE", help="memory of an R-rank's KV cache, such as 64G")
    help = "most memory of a GPU that a rank takes, KV cache included (default: what is free)"
    add("--gpu-memory", type=size, metavar="SIZE", help=help)


def _generate(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    given = vars(options)  # only flags that were given, since none has a default
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
    gc.disable()  # until generate() has loaded what stays; collections would traverse all of it repeatedly
    try:
        from hpcdecode.generate import generate
    except (ImportError, MemoryError) as error:
        expected = "expected the libraries that hpcdecode needs to load"
        raise UserError(
            f"{expected}: {first_line(error)}; give the process more memory, or install them anew"
        ) from error
    return generate(job, comm, signals=options.signals)


def _pick(kind: type[S], values: dict[str, Any]) -> S:
    """Return the struct `kind` made of those values that are its fields."""
    own = {name: values[name] for name in kind.__struct_fields__ if name in values}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in own.items()})


def _count(text: str) -> int | None:
    """Return the number, or None for `auto`."""
    return None if text == "auto" else int(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = (part.split(":") for part in text.split(","))
    return {int(token): float(bias) for token, bias in pairs}


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object from its text or from a file."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object or a file of one: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {value!r}")
    return value


COMMANDS = (_add_generate,)
