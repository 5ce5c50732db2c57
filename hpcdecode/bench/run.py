"""`hpcdecode bench NAME`: measurements as ratios to a reference taken in the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from hpcdecode.bench.output import Report
from hpcdecode.report.text import table

if TYPE_CHECKING:
    from mpi4py import MPI


def main(
    name: str,
    arguments: Sequence[str],
    comm: MPI.Intracomm | None = None,
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """Run a benchmark and print a table, or with --json one object: bench, machine, cases.

    Args:
        name: Of a module in `hpcdecode.bench`.
        arguments: Its flags.
        comm: The ranks on which it was started, for those that measure several; one of them prints.
        parser_class: What parses the flags.

    Returns:
        The exit code: 0, or that of a benchmark which returns one in place of a report.
    """
    module = import_module(f"hpcdecode.bench.{name}")
    parser = parser_class(
        prog=f"hpcdecode bench {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    module.add_arguments(parser)
    options = parser.parse_args(arguments, argparse.Namespace(comm=comm, arguments=arguments))
    result: Report | int | None = module.run(options)
    if isinstance(result, int):
        return result
    if result is not None:
        print(json.dumps(result, indent=1) if options.json else _text(result))
    return 0


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.4g}"


def _text(result: Report) -> str:
    """Return the cases as a table, below the facts of the machine."""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    header = ("case", "value", "unit", "ratio", "spread", "against")
    rows = (
        (
            c["case"],
            _number(c["value"]),
            c["unit"],
            _number(c["ratio"]),
            " .. ".join(map(_number, c["spread"])),
            c["reference"],
        )
        for c in result["cases"]
    )
    return f"{machine}\n\n{table(header, rows)}"
