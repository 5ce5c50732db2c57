"""The command line: one subcommand a function."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence as Seq

from hpcdecode import __version__
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.job import DTYPES, KV_DTYPES, Job, default_output, find_model
from hpcdecode.sampling.params import SamplingParams

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def main(arguments: Seq[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (0 done, 1 failed, 2 the job cannot run as asked, 128 + signal)."""
    from hpcdecode import launch

    # Ranks share cores with each other and with the R-part's threads: OpenMP's must not spin long (libgomp's default).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = _parse(arguments, speak=launch.is_lead())
    if options is None:
        return 0
    comm = None
    try:
        comm = launch.world() if options.parallel else None
        return options.run(options, comm)
    except UserError as error:
        if comm is not None and not error.everywhere:
            launch.abort(comm, error, 2)
        if not launch.is_lead():
            return 0  # a launcher that kills on bad exit must not end the lead before it has spoken
        print(f"hpcdecode: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        launch.abort(comm, UserError("interrupted before the first step"), 130)
    except BrokenPipeError:
        return 1
    except Exception as error:
        launch.abort(comm, error)


def _parse(arguments: Seq[str] | None, speak: bool) -> argparse.Namespace | None:
    """Every rank parses the same command line, and one speaks for all; None for a rank that leaves it to that one."""
    if speak:
        return _parser().parse_args(arguments)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return _parser().parse_args(arguments)
    except SystemExit:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcdecode", description="Offline LLM text generation for HPC clusters.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hpcdecode {__version__}")
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_show(commands)
    _add_split(commands)
    _add_bench(commands)
    return parser


def _add_generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text for the rows of a prompt file",
        description="Generate text for every row of a JSON Lines file of prompts, into one HDF5 file.",
        allow_abbrev=False,
    )
    defaults = SamplingParams()
    add = parser.add_argument
    add("prompts", metavar="PROMPTS", help="JSON Lines file: prompt, prompt_token_ids or messages a row")
    add("--model", metavar="DIR", help="Hugging Face model directory, or demo (HPCDECODE_MODEL, hpcdecode.toml)")
    add("-o", "--output", metavar="OUT.h5", help="results (the prompt file's name with .h5)")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    sampling = parser.add_argument_group("sampling (a row's own fields win)")
    add = sampling.add_argument
    add("--max-tokens", type=int, default=defaults.max_tokens, metavar="N", help="(%(default)s)")
    add("--temperature", type=float, default=defaults.temperature, metavar="T", help="0 is greedy (%(default)s)")
    add("--top-k", type=int, default=defaults.top_k, metavar="K", help="0 for all tokens (%(default)s)")
    add("--top-p", type=float, default=defaults.top_p, metavar="P", help="(%(default)s)")
    add("--seed", type=int, default=defaults.seed, metavar="S", help="(%(default)s)")
    add("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")
    add("--stop-token-ids", type=_ids, default=(), metavar="ID[,ID...]", help="token ids that end a sequence")
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
    add("--s-ranks", type=int, metavar="K", help="ranks that hold weights; the others hold KV caches (1)")
    add("--kv-memory", type=_bytes, metavar="SIZE", help="KV cache of an R-rank, such as 64G")
    parser.set_defaults(run=_generate, parallel=True)


def _generate(options: argparse.Namespace, comm) -> int:
    try:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
            stop_token_ids=options.stop_token_ids,
        ).check()
    except RowProblem as problem:
        raise UserError(f"--{problem}".replace("_", "-", 2), everywhere=True) from None
    job = Job(
        prompts=options.prompts,
        model=find_model(options.model, os.environ),
        output=options.output or default_output(options.prompts),
        params=params,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        batch=options.batch,
        period=options.period,
        lanes=options.lanes,
        prefill_tokens=options.prefill_tokens,
        s_ranks=options.s_ranks,
        kv_memory=options.kv_memory,
        overwrite=options.overwrite,
    ).check()
    from hpcdecode.generate import generate

    return generate(job, comm)


def _add_show(commands) -> None:
    parser = commands.add_parser(
        "show",
        help="print rows of a results file",
        description="Print rows of a results file: those of the given lines of the prompt file, or the first ones.",
        allow_abbrev=False,
    )
    parser.add_argument("results", metavar="OUT.h5")
    parser.add_argument("lines", metavar="LINE", nargs="*", type=int, help="1-based lines of the prompt file")
    parser.set_defaults(run=_show, parallel=False)


def _show(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.data.show import show

    for text in show(options.results, options.lines):
        print(text)
    return 0


def _add_split(commands) -> None:
    parser = commands.add_parser(
        "split",
        help="show how a model is cut into slices",
        description="Trace a model, cut it at every attention, and print the slices and what crosses the cuts.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face model directory, or demo")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the activations on the wire (the checkpoint's)"
    )
    parser.set_defaults(run=_split, parallel=False)


def _split(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.model import load_split, render

    model = load_split(find_model(options.model, {}), dtype=options.dtype, weights=False)
    print(render(model.describe()))
    return 0


def _add_bench(commands) -> None:
    parser = commands.add_parser(
        "bench", help="measure against the machine's limits", description="Measure one part.", allow_abbrev=False
    )
    parser.add_argument("name", choices=("attention", "prefill"), help="what to measure")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own flags; see hpcdecode bench NAME --help")
    parser.set_defaults(run=_bench, parallel=False)


def _bench(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.perf.bench import main as bench

    return bench(options.name, options.arguments)


def _count(text: str) -> int | None:
    """`auto` is None."""
    return None if text == "auto" else int(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmgt]?)(i?b)?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M or 64G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]
