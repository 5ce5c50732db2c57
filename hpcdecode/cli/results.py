"""`hpcdecode show`, `export`, `merge` and `report`: results read again."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import wraps

from hpcdecode.data.results.export import FORMATS
from hpcdecode.data.results.openai import OBJECTS
from hpcdecode.errors import UserError

_READER_GONE = 141  # as shells report a process that SIGPIPE ended


def _printing(run: Callable[[argparse.Namespace, object], int]) -> Callable[[argparse.Namespace, object], int]:
    """Let a subcommand end quietly where its reader has gone, as `head` does, and with a message on a full disk."""

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
    """Let what is left in the buffer of standard output go nowhere: Python would try to write it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _add_show(commands) -> None:
    parser = commands.add_parser(
        "show",
        help="print rows of a results file",
        description="Print rows of a results file: those of the given lines of the prompt file, or the first ones.",
        allow_abbrev=False,
    )
    parser.add_argument("results", metavar="OUT.h5")
    parser.add_argument("lines", metavar="LINE", nargs="*", type=int, help="1-based lines of the prompt file")
    parser.set_defaults(run=_show)


@_printing
def _show(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.data.results.show import show

    for text in show(options.results, options.lines):
        print(text)
    return 0


def _add_export(commands) -> None:
    parser = commands.add_parser(
        "export",
        help="write results in another format",
        description="Write the rows of a results file as JSON Lines, Parquet, or the output file of an OpenAI batch.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("results", metavar="OUT.h5")
    add("--to", required=True, choices=tuple(FORMATS), help="format")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help="- for standard output (OUT.results.jsonl, OUT.results.parquet, OUT.batch.jsonl)",
    )
    add("--overwrite", action="store_true", help="replace the file if it exists")
    add("--columns", metavar="NAME[,NAME...]", help="(all)")
    add("--where", metavar="CONDITION", action="append", default=[], help="such as finish_reason=stop; all must hold")
    add("--endpoint", choices=tuple(OBJECTS), default="chat", help="of the requests of an OpenAI batch (%(default)s)")
    parser.set_defaults(run=_export)


@_printing
def _export(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.data.results.export import export
    from hpcdecode.system.durable import is_stream

    columns = None if options.columns is None else [name for name in options.columns.split(",") if name]
    choice = {"columns": columns, "where": options.where, "endpoint": options.endpoint}
    written = export(options.results, options.output, options.to, overwrite=options.overwrite, **choice)
    if not is_stream(written):
        print(written)
    return 0


def _add_merge(commands) -> None:
    parser = commands.add_parser(
        "merge",
        help="join the results of parts of a job",
        description="Join results files of the same model and sampling, complete or not, into one sorted by line; of "
        "shards (generate --shard) all are needed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("output", metavar="OUT.h5")
    add("results", metavar="PART.h5", nargs="+")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    parser.set_defaults(run=_merge)


def _merge(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.data.results.join import join

    join(options.output, options.results, overwrite=options.overwrite)
    return 0


def _add_report(commands) -> None:
    parser = commands.add_parser(
        "report",
        help="show where the time of a job went, rank by rank",
        description="Show each rank's shares: busy; overhead of the loop; wait (S for o, R for q, k, v); bubble (R "
        "without a plan). Its peak KV load too, and with -o both over time as a picture (extra plot).",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="OUT.h5|TRACE.json", help="results, or what --trace wrote")
    parser.add_argument("-o", "--output", metavar="FILE.png", help="draw them (no picture)")
    parser.set_defaults(run=_report)


@_printing
def _report(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.report import account, plot

    accounts = account.read(options.file)
    print(account.text(accounts))
    if options.output:
        plot.draw(accounts, options.output)
    return 0


COMMANDS = (_add_show, _add_export, _add_merge, _add_report)
