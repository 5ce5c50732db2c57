"""`hpcdecode show`, `export`, `merge` and `report`: read results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from hpcdecode.data.results.export import FORMATS
from hpcdecode.data.results.openai_body import OBJECTS
from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from hpcdecode.cli.arguments import Subcommands

_READER_GONE = 141  # exit code that shells report for SIGPIPE


def _printing(run: Callable[[argparse.Namespace, object], int]) -> Callable[[argparse.Namespace, object], int]:
    """Let a subcommand end silently if the reader of its output has ended, and with a message if the disk is full."""

    @wraps(run)
    def printed(options: argparse.Namespace, comm: object) -> int:
        try:
            code = run(options, comm)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            _forget_output()
            return _READER_GONE
        except OSError as error:
            _forget_output()
            raise UserError(f"standard output: writing failed: {error}") from None

    return printed


def _forget_output() -> None:
    """Discard what is left in the buffer of standard output, which Python would write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _add_show(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "show",
        help="print rows of a results file",
        description="Print rows of a results file: those of given lines of the prompt file or ids, or the first ones.",
    )
    parser.add_argument("results", metavar="OUT.h5", help="results file")
    help = "lines of the prompt file from 1, ranges of lines such as 1-5, or ids"
    parser.add_argument("rows", metavar="ROW", nargs="*", help=help)
    _add_where(parser, "print")
    parser.set_defaults(run=_show)


@_printing
def _show(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.data.results.show import show

    for text in show(options.results, options.rows, options.where):
        print(text)
    return 0


def _add_where(parser: argparse.ArgumentParser, verb: str) -> None:
    help = f"{verb} only rows with this property, such as finish_reason=stop, or label=yes of an input column; signs "
    help += "are = != < <= > >=; if given several times, all must hold"
    parser.add_argument("--where", metavar="CONDITION", action="append", default=[], help=help)


def _add_export(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "export",
        help="write results in another format",
        description="Write the rows of a results file as JSON Lines, CSV, Parquet, or the output of an OpenAI batch.",
    )
    add = parser.add_argument
    add("results", metavar="OUT.h5", help="results file")
    add("--to", choices=tuple(FORMATS), help="format of the file to write (default: by the ending of -o)")
    help = "file to write, or - for standard output "
    help += "(default: OUT.results.jsonl, OUT.results.csv, OUT.results.parquet or OUT.batch.jsonl)"
    add("-o", "--output", metavar="FILE", help=help)
    add("--overwrite", action="store_true", help="replace the file if it exists")
    add("--columns", metavar="NAME[,NAME...]", help="write only these columns (default: all)")
    _add_where(parser, "write")
    help = "endpoint of the requests of an OpenAI batch (%(default)s)"
    add("--endpoint", choices=tuple(OBJECTS), default="chat", help=help)
    parser.set_defaults(run=_export)


@_printing
def _export(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.data.results.export import export
    from hpcdecode.system.durable import is_stream

    columns = None if options.columns is None else [name for name in options.columns.split(",") if name]
    written = export(
        options.results,
        options.output,
        options.to,
        overwrite=options.overwrite,
        columns=columns,
        where=options.where,
        endpoint=options.endpoint,
    )
    if not is_stream(written):
        print(written)
    return 0


def _add_merge(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "merge",
        help="join the results of parts of a job",
        description="Join results files of the same model and sampling, complete or not, into one file sorted by line. "
        "All shards of a job (generate --shard) are needed.",
    )
    add = parser.add_argument
    add("output", metavar="OUT.h5", help="file for the joined results")
    add("results", metavar="PART.h5", nargs="+", help="results files to join")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    parser.set_defaults(run=_merge)


def _merge(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.data.results.join import join

    join(options.output, options.results, overwrite=options.overwrite)
    return 0


def _add_report(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "report",
        help="show where the time of a job went, rank by rank",
        description="Show each rank's peak KV load and the shares of its time: busy, overhead of the loop, wait (S for "
        "o; R for q, k, v), bubble (R without a plan). -o plots the shares, and the load over time (extra plot); "
        "-o FILE.html writes one page of the whole job instead, which needs no network: throughput, KV load, ranks, "
        "lengths, errors and texts. The job may not have ended yet. A trace gives a page of its ranks over time.",
    )
    parser.add_argument("file", metavar="OUT.h5|TRACE.json", help="results file, or a file that generate --trace wrote")
    parser.add_argument("-o", "--output", metavar="FILE", help="page (.html) or plot (.png) to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the page if it exists")
    parser.set_defaults(run=_report)


@_printing
def _report(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.report import account, plot
    from hpcdecode.report.page.write import ENDINGS, write_page

    if options.output and options.output.lower().endswith(ENDINGS):
        write_page(options.file, options.output, overwrite=options.overwrite)
        print(options.output)
        return 0
    accounts = account.read(options.file)
    print(account.text(accounts))
    if options.output:
        plot.draw(accounts, options.output)
    return 0


def _add_top(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "top",
        help="show a running job in the terminal",
        description="Show rows, speed, KV load and errors of a running job from its files, on any host that sees them, "
        "until it ends, q is pressed or Ctrl-C. If the output is no terminal, it is printed once.",
    )
    parser.add_argument("results", metavar="OUT.h5", help="results file")
    help = "seconds between two views (%(default)g)"
    parser.add_argument("-n", "--seconds", type=float, default=1.0, metavar="SECONDS", help=help)
    parser.set_defaults(run=_top)


@_printing
def _top(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.report.top import top

    if not 0.1 <= options.seconds <= 3600:
        raise UserError(f"-n: expected 0.1 to 3600 seconds, got {options.seconds:g}")
    top(options.results, options.seconds)
    return 0


COMMANDS = (_add_show, _add_export, _add_merge, _add_report, _add_top)
