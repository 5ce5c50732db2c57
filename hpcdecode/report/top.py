"""The command `hpcdecode top OUT.h5`: a running job in the terminal, from its files alone."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from hpcdecode.data.results.read import Results
from hpcdecode.data.results.status import JobStatus, holder, is_running, read_status
from hpcdecode.report.page.config import layout, ranks_of
from hpcdecode.report.page.facts import Cause, causes_of
from hpcdecode.report.page.scales import duration
from hpcdecode.requests.values import printable
from hpcdecode.system.hub import HUB_FOLDER

_BAR = 30  # characters of a bar
_SHOWN_CAUSES = 5
_READ_SHARE = 20  # reading the results takes at most one part in so many of the time


class View(NamedTuple):
    """What is shown.

    Attributes:
        lines: Lines of text.
        over: Whether the job has ended.
    """

    lines: list[str]
    over: bool


class JobFiles:
    """The files of a job, of which the results are read again only when they have changed.

    Args:
        path: The results file.

    Raises:
        UserError: It is not a results file.
    """

    def __init__(self, path: str) -> None:
        self.path, self._output = path, Path(os.path.realpath(path))
        self._changed, self._due = -1, 0.0  # time of the file's last change; when it may be read again
        self._read()

    def view(self) -> View:
        """Return what there is to see now."""
        status = read_status(self._output)
        running = is_running(self._output, status)
        self._read(at_once=not running)
        if self.complete:
            return View([f"{printable(self.path)}: complete", *self._done(None), *self._errors()], over=True)
        if not running:
            line = f"{printable(self.path)}: not running; the same command goes on"
            return View([line, *self._done(None), *self._errors()], over=True)
        who = printable(holder(self._output))
        since = f" for {duration(status.seconds)}" if status else ""
        lines = [f"{printable(self.path)}: running{since} ({who})", f"model    {self.model}"]
        lines += [f"ranks    {layout(self.ranks)}"] if self.ranks else []
        lines += [*self._done(status), *(self._speed(status) if status else [])]
        return View([*lines, *self._errors()], over=False)

    def _read(self, at_once: bool = False) -> None:
        """Read the results if they have changed since, though not often if that takes long."""
        start, changed = time.monotonic(), os.stat(self._output).st_mtime_ns if self._output.exists() else 0
        if changed == self._changed or (start < self._due and not at_once):
            return
        with Results(self.path) as results:
            self.complete, self.model = results.complete, _model(results.attributes.get("model"))
            self.rows, self.ranks = len(set(results.column("line").tolist())), ranks_of(results.attributes)
            self.causes, self.errors = causes_of(results)
        self._changed = changed
        self._due = time.monotonic() + _READ_SHARE * (time.monotonic() - start)

    def _done(self, status: JobStatus | None) -> list[str]:
        """Return the line on rows: what the job says of them, None if it does not run, and those on disk."""
        on_disk = self.rows + self.errors
        done, errors = max(status.done if status else 0, on_disk), max(status.errors if status else 0, self.errors)
        total = on_disk if self.complete else status.total if status else None
        of = f" of {total:,} ({done / max(total, 1):.0%})" if total is not None else ""
        failed = f", {errors:,} errors" if errors else ""
        return [f"rows     {bar(done, total)}{done:,}{of}{failed}; on disk {on_disk:,}"]

    def _speed(self, status: JobStatus) -> list[str]:
        left = "" if status.seconds_left is None else f", about {duration(status.seconds_left)} left"
        lines = [f"speed    {status.rows_per_second:,.1f} rows/s, {status.tokens_per_second:,.0f} tokens/s{left}"]
        if status.capacity:
            share = status.held / status.capacity
            whose = f", group 1 of {status.groups:,}" if status.groups > 1 else ""
            of = f"{status.held:,} of {status.capacity:,} tokens ({share:.0%}){whose}"
            lines.append(f"KV load  {bar(status.held, status.capacity)}{of}")
        silent = time.time() - status.time
        return [*lines, *([f"         nothing new for {duration(silent)}"] if silent > 5 else [])]

    def _errors(self) -> list[str]:
        lines = [_cause(cause) for cause in self.causes[:_SHOWN_CAUSES]]
        more = len(self.causes) - len(lines)
        lines += [f"         {more:,} more causes"] if more > 0 else []
        return ["errors by cause", *lines] if lines else []


def _model(attribute: object) -> str:
    """Return name and data type of a model; of one in the hub's cache, its name there."""
    found = attribute if isinstance(attribute, dict) else {}
    path = str(found.get("path", ""))
    hub = [part for part in path.split(os.sep) if part.startswith(HUB_FOLDER)]
    name = hub[0].removeprefix(HUB_FOLDER).replace("--", "/") if hub else os.path.basename(path)
    return printable(f"{name}, {found.get('dtype', '')}")


def _cause(cause: Cause) -> str:
    return f"{cause.number:8,} {printable(cause.reason)} (line {cause.lines[0]:,})"


def bar(value: float, most: float | None) -> str:
    """Return a bar of `value` of `most` with a space after it; nothing if there is no `most`."""
    if not most:
        return ""
    filled = round(_BAR * min(max(value / most, 0), 1))
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] "


def top(path: str, seconds: float, out: TextIO = sys.stdout) -> None:
    """Show a job until it ends, `q` is pressed or Ctrl-C; once only if the output is no terminal.

    Args:
        path: The results file.
        seconds: Seconds between two views.
        out: Where it is written.

    Raises:
        UserError: It is not a results file.
    """
    files = JobFiles(path)
    if not out.isatty():
        out.write("\n".join(files.view().lines) + "\n")
        return
    shown = 0
    with _interrupts() as interrupted, _keys() as keys:
        while True:
            view = files.view()
            shown = _draw(view.lines, shown, out)
            if view.over or _asked_to_leave(interrupted, keys, seconds):
                return


@contextmanager
def _interrupts() -> Iterator[int]:
    """Give a descriptor to read from once a SIGINT has come, which raises nothing inside: libraries may swallow it."""
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGINT, lambda *_: os.write(writer, b"\n"))
    try:
        yield reader
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(reader)
        os.close(writer)


def _draw(lines: Sequence[str], before: int, out: TextIO) -> int:
    """Write lines over those of the view before; return how many there are."""
    columns, rows = shutil.get_terminal_size()
    lines = [line[: columns - 1] for line in lines[: max(rows - 1, 1)]]
    up = f"\x1b[{before}F" if before else ""
    out.write(up + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    out.flush()
    return len(lines)


@contextmanager
def _keys() -> Iterator[int | None]:
    """Give a descriptor to read keys from one by one, or None."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _asked_to_leave(interrupted: int, keys: int | None, seconds: float) -> bool:
    """Wait so many seconds for an interrupt or a key; return whether it, or the end of the keys, ends the view."""
    ready, _, _ = select.select([interrupted, *([] if keys is None else [keys])], [], [], seconds)
    return interrupted in ready or (keys in ready and os.read(keys, 1) in (b"q", b"Q", b""))
