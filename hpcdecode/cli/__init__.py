"""The command line: from arguments to a subcommand and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence

from hpcdecode._version import __version__
from hpcdecode.cli import generate, machine, planning, results
from hpcdecode.errors import UserError
from hpcdecode.ranks import launch
from hpcdecode.system.cores import set_libraries


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0 done, 1 failed, 2 not as asked; others are the subcommand's."""
    set_libraries(launch.started())
    try:
        options = _parse(arguments, speak=launch.is_lead())
    except SystemExit as end:
        return launch.leave(None, end.code)
    if options is None:
        return 0
    with options.signals or contextlib.nullcontext():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    comm = None
    try:
        comm = options.connect() if options.connect else None
        return launch.leave(comm, options.run(options, comm))
    except UserError as error:
        if comm is not None and not error.everywhere:
            launch.abort(comm, error, 2)
        if not launch.is_lead():
            return launch.leave(comm, 0)
        print(f"hpcdecode: error: {error}", file=sys.stderr, flush=True)
        return launch.leave(comm, 2)
    except KeyboardInterrupt:
        launch.abort(comm, UserError("interrupted before the first step"), 130)
    except BrokenPipeError:
        return 1
    except Exception as error:
        launch.abort(comm, error)


def _parse(arguments: Sequence[str] | None, speak: bool) -> argparse.Namespace | None:
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
    parser.set_defaults(connect=None, signals=None)  # most subcommands run in one process, and end at a signal
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for add in (*generate.COMMANDS, *results.COMMANDS, *machine.COMMANDS, *planning.COMMANDS):
        add(commands)
    return parser
