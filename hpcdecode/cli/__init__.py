"""The command line: arguments in, a subcommand's exit code out."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcdecode._version import __version__
from hpcdecode.cli import generate, log, machine, planning, results, serve
from hpcdecode.cli.parser import Parser
from hpcdecode.errors import UserError
from hpcdecode.ranks import launch
from hpcdecode.system.cores import set_libraries

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: Arguments of the command; None for those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 2 not as asked, or another one of the subcommand.
    """
    log.set_up()
    set_libraries(launch.started())
    try:
        options = parse(arguments, speak=launch.is_lead())
    except SystemExit as end:
        return launch.leave(None, end.code if isinstance(end.code, int) else 0)
    if options is None:
        return 0
    log.set_up(options.verbosity)
    with options.signals or contextlib.nullcontext():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    comm: MPI.Intracomm | None = None
    try:
        comm = options.connect() if options.connect else None
        return launch.leave(comm, options.run(options, comm))
    except UserError as error:
        if comm is not None and not error.everywhere:
            launch.abort(comm, error, 2)
        if not launch.is_lead():
            return launch.leave(comm, 0)
        logger.error(f"hpcdecode: error: {error}")
        return launch.leave(comm, 2)
    except KeyboardInterrupt:
        launch.abort(comm, UserError(options.signals.interruption if options.signals else "interrupted"), 130)
    except BrokenPipeError:
        return 1
    except Exception as error:
        launch.abort(comm, error)


def parse(arguments: Sequence[str] | None, speak: bool) -> argparse.Namespace | None:
    """Return the options, or None on a rank that leaves help and errors to the rank that speaks for all."""
    if speak:
        return _parser().parse_args(arguments)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return _parser().parse_args(arguments)
    except SystemExit:
        return None


def _parser() -> argparse.ArgumentParser:
    description = "Offline LLM text generation for HPC clusters."
    parser: argparse.ArgumentParser = Parser(prog="hpcdecode", description=description)
    parser.add_argument("--version", action="version", version=f"hpcdecode {__version__}")
    # Most subcommands run in a single process and end at a signal.
    parser.set_defaults(connect=None, signals=None, verbosity=logging.INFO)
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for add in (*generate.COMMANDS, *serve.COMMANDS, *results.COMMANDS, *machine.COMMANDS, *planning.COMMANDS):
        add(commands)
    return parser
