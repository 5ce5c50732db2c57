"""The parser of the command line: its errors are one line, and name the flag that was probably meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_WORDINGS = (  # argparse's, and ours
    (r"argument (\S+): invalid int value: (.*)", r"\1: expected an integer, got \2"),
    (r"argument (\S+): invalid float value: (.*)", r"\1: expected a number, got \2"),
    (r"argument (\S+): expected one argument", r"\1: expected a value, got none"),
    (r"argument (\S+): expected at least one argument", r"\1: expected at least one value, got none"),
    (r"argument (\S+): expected (\d+) arguments", r"\1: expected \2 values, got others"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1: expected to be alone, got \2 too"),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1: expected no value, got \2"),
    (r"the following arguments are required: COMMAND", "expected a subcommand, got none"),
    (r"the following arguments are required: (.*)", r"expected \1, got none"),
    (r"ambiguous option: (\S+) could match (.*)", r"\1: expected one flag, got the beginning of \2"),
    (r"argument (\S+): (.*)", r"\1: \2"),
)
_CHOICE = re.compile(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", re.DOTALL)


def near(name: str, known: Collection[str]) -> str:
    """Return "; did you mean X?" for the one of `known` that is nearest to `name`, or nothing if none is near."""
    found = get_close_matches(name, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


class Parser(argparse.ArgumentParser):
    """A parser that takes underscores for hyphens and beginnings of flags, if these are unambiguous."""

    def parse_known_args(  # type: ignore[override]  # of which typeshed has overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; end the process with exit code 2 and a line on standard error if any is unknown."""
        given = [_with_hyphens(each) for each in (sys.argv[1:] if args is None else args)]
        found, unknown = super().parse_known_args(given, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            first = unknown[0]
            if first.startswith("-"):
                first = first.partition("=")[0]
                self.error(f"expected a known flag, got {first}{near(first, flags)}")
            meant = f"; did you mean --prompts {first}?" if "--prompts" in flags else ""
            self.error(f"expected no further argument, got {first!r}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2 and a line on standard error."""
        self.exit(2, f"{self.prog}: error: {_worded(message)} (--help lists all)\n")


def _with_hyphens(argument: str) -> str:
    """Return an argument; if it is a flag, with hyphens in its name in place of underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _worded(message: str) -> str:
    """Return a message of argparse as what was expected and what came."""
    if found := _CHOICE.fullmatch(message):
        flag, came, choices = found[1], found[2].strip("'\""), [c.strip(" '\"") for c in found[3].split(",")]
        what = "expected a subcommand," if flag == "COMMAND" else f"{flag}: expected"
        return f"{what} one of {', '.join(choices)}; got {came!r}{near(came, choices)}"
    for pattern, wording in _WORDINGS:
        if found := re.fullmatch(pattern, message, re.DOTALL):
            return found.expand(wording)
    return message
