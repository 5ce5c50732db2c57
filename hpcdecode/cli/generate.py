"""`hpcdecode generate`: flags become a Job."""

from __future__ import annotations

import argparse
import os
import re

from hpcdecode import launch
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.job import DTYPES, KV_DTYPES, Job, default_output, find_model
from hpcdecode.sampling.params import SamplingParams

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _add_generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text for the rows of a prompt file",
        description="Generate text for every row of the prompt files, into one HDF5 file. The same command again "
        "continues an interrupted job. Exit code: 0 all rows done, 3 done but for rows under /errors, 2 the job cannot "
        "run as asked, 1 failed, 128 + signal stopped.",
        allow_abbrev=False,
    )
    defaults = SamplingParams()
    add = parser.add_argument
    add(
        "prompts",
        metavar="PROMPTS",
        nargs="+",
        help="files, patterns or - (stdin): .jsonl, .jsonl.gz, .jsonl.zst with prompt, prompt_token_ids or messages a "
        "row, or requests of the OpenAI batch format; .parquet; .h5",
    )
    add("--model", metavar="DIR", help="Hugging Face model directory, or demo (HPCDECODE_MODEL, hpcdecode.toml)")
    add("-o", "--output", metavar="OUT.h5", help="results (the prompt file's name with .h5)")
    add("--overwrite", action="store_true", help="start anew in place of what the output holds")
    rows = parser.add_argument_group("rows")
    add = rows.add_argument
    add("--prompt-column", metavar="NAME", help="where rows have their prompt (prompt); in HDF5 a dataset's path")
    add("--limit", type=int, metavar="N", help="take the first N rows only")
    add("--max-errors", type=int, metavar="N", help="stop when more than N rows cannot be used (never)")
    add("--fail-fast", dest="max_errors", action="store_const", const=0, help="stop at the first of them")
    add(
        "--checkpoint-every",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="between commits of finished rows and of those in flight (%(default)s)",
    )
    sampling = parser.add_argument_group("sampling (a row's own fields win)")
    add = sampling.add_argument
    add("--n", type=int, default=defaults.n, metavar="N", help="samples of every row (%(default)s)")
    add("--max-tokens", type=int, default=defaults.max_tokens, metavar="N", help="(%(default)s)")
    add("--min-tokens", type=int, default=defaults.min_tokens, metavar="N", help="before anything stops (%(default)s)")
    add("--temperature", type=float, default=defaults.temperature, metavar="T", help="0 is greedy (%(default)s)")
    add("--top-k", type=int, default=defaults.top_k, metavar="K", help="0 for all tokens (%(default)s)")
    add("--top-p", type=float, default=defaults.top_p, metavar="P", help="(%(default)s)")
    add("--min-p", type=float, default=defaults.min_p, metavar="P", help="as a share of the greatest (%(default)s)")
    for name, what in (
        ("presence", "once for a generated token"),
        ("frequency", "each time it was generated"),
        ("repetition", "a factor, for the prompt's tokens too"),
    ):
        default = getattr(defaults, f"{name}_penalty")
        add(f"--{name}-penalty", type=float, default=default, metavar="X", help=f"{what} (%(default)s)")
    add("--logit-bias", type=_biases, default={}, metavar="ID:X[,ID:X...]", help="added to the logits of token ids")
    add("--bad-words", action="append", default=[], metavar="TEXT", help="never generated; may be given again")
    add("--seed", type=int, default=defaults.seed, metavar="S", help="(%(default)s)")
    add("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")
    add("--stop-token-ids", type=_ids, default=(), metavar="ID[,ID...]", help="token ids that end a sequence")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a sequence; may be given again")
    add("--include-stop-str-in-output", action="store_true", help="leave the stop string in the text")
    add("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True, help="in the text (yes)")
    add("--truncate-prompt-tokens", type=int, metavar="N", help="keep a prompt's last N; -1 for what there is room for")
    add("--beam-width", type=int, metavar="W", help="search for the W likeliest continuations, the row's samples")
    add("--length-penalty", type=float, default=defaults.length_penalty, metavar="X", help="of beams (%(default)s)")
    add("--logprobs", type=int, metavar="K", help="keep tokens' log-probabilities, and those of the K most likely ones")
    add("--prompt-logprobs", type=int, metavar="K", help="the same of the prompts' tokens")
    size = parser.add_argument_group("size (auto if not given)")
    add = size.add_argument
    add("--dtype", choices=DTYPES, help="of weights and activations")
    add("--kv-dtype", choices=KV_DTYPES, help="of the KV cache (as --dtype)")
    add("--batch", type=_count, metavar="B", help="sequences decoding at once in the steady state")
    add("--period", type=_count, metavar="F", help="steps between two injections")
    add("--lanes", type=_count, metavar="L", help="mini-batches in flight per S-rank (2, or 1 in one process)")
    add(
        "--prefill-tokens", type=int, default=512, metavar="N", help="most prompt tokens a step of a lane (%(default)s)"
    )
    add(
        "--no-prefix-sharing",
        dest="prefix_sharing",
        action="store_false",
        help="prefill every prompt in full, whatever it begins with",
    )
    add("--s-ranks", type=int, metavar="K", help="ranks that hold weights; the others hold KV caches (1)")
    add("--kv-memory", type=_bytes, metavar="SIZE", help="KV cache of an R-rank, such as 64G")
    parser.set_defaults(run=_generate, connect=launch.world)


def _generate(options: argparse.Namespace, comm) -> int:
    try:
        params = _sampling(options).check()
    except RowProblem as problem:
        raise UserError(f"--{problem}".replace("_", "-", 2), everywhere=True) from None
    job = Job(
        prompts=tuple(options.prompts),
        model=find_model(options.model, os.environ),
        output=options.output or default_output(options.prompts),
        params=params,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        batch=options.batch,
        period=options.period,
        lanes=options.lanes,
        prefill_tokens=options.prefill_tokens,
        prefix_sharing=options.prefix_sharing,
        s_ranks=options.s_ranks,
        kv_memory=options.kv_memory,
        overwrite=options.overwrite,
        prompt_column=options.prompt_column,
        limit=options.limit,
        max_errors=options.max_errors,
        checkpoint_every=options.checkpoint_every,
    ).check()
    from hpcdecode.generate import generate

    return generate(job, comm)


def _sampling(options: argparse.Namespace) -> SamplingParams:
    values = {name: getattr(options, name) for name in SamplingParams.__struct_fields__}
    return SamplingParams(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _count(text: str) -> int | None:
    """`auto` is None."""
    return None if text == "auto" else int(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = (part.split(":") for part in text.split(","))
    return {int(token): float(bias) for token, bias in pairs}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmgt]?)(i?b)?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M or 64G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


COMMANDS = (_add_generate,)
