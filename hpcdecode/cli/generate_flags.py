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
from hpcdecode.cli.size_flags import add_faults, add_model, add_size
from hpcdecode.config import Job
from hpcdecode.data.prompts.kept import parse_names
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.shard import Shard
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
    add_size(size)
    help = "profile of hpcdecode calibrate, measured on as many ranks, from which the layout is chosen, and batch, "
    help += "period and lanes of a job of many rows; with --kv-swap and without --schedule the schedule, too"
    size.add_argument("--profile", metavar="FILE", help=help)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of `score`: those of `generate` that do not say how text is generated."""
    _add_job(parser, "text, and may have continuation, continuations or choices")
    _add_job_groups(parser)
    add_given_tokens(parser.add_argument_group("scores (a row's own fields win)"))
    add_size(parser.add_argument_group("size (auto if not given)"))


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
    add_model(parser)
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
    help = "do without the model's tokenizer, which it need not have: rows have prompt_token_ids, results no texts"
    add("--skip-tokenizer-init", action="store_true", help=help)
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
    add_faults(group)


def text_or_file(text: str) -> str:
    """Return a text, or what a file of that name holds."""
    if not os.path.isfile(text):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a text, or a readable file of UTF-8: {error}") from None
