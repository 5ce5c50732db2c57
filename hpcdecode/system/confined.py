"""Work on untrusted input in a process of its own, bounded in time and memory: what kills it costs one request.

`Confined` is this side. The module that it starts calls `serve`: requests come on standard input and answers go to
standard output, each msgpack after its length (4 bytes, little endian), until the input ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hpcdecode.errors import UserError

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 30  # of an answer
_WALL_SECONDS = 120.0  # for an answer; the kernel ends a process that computes for longer than it may
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # meant for the job
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class Answer(msgspec.Struct, array_like=True):
    """What became of a request.

    Attributes:
        kind: of the server's own; or `failed` (value: what was raised), `memory`, `unusable` (a module is missing), and
            from this side `time` or `ended` (value: how the process ended).
        value: what it is about.
    """

    kind: str
    value: Any = None


class Confined:
    """A process that answers requests. It ends with this object, and with the process that holds it.

    Args:
        command: arguments of the Python interpreter, such as `-m MODULE`.
        what: it does, for messages.

    Raises:
        UserError: it cannot be started.
    """

    def __init__(self, command: tuple[str, ...], what: str):
        try:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],  # where this package is found, and nothing that a user has put
                env=_environment(),
                start_new_session=True,  # what a terminal sends is for the job
            )
        except OSError as error:
            raise UserError(f"expected a process for {what}, none can be started: {error}") from error
        self._end = weakref.finalize(self, _ended, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: bytes) -> Answer:
        """Return the answer to a request in msgpack; one of kind `time` or `ended` if the process ends instead."""
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        late = time.monotonic() + _WALL_SECONDS
        try:
            _write(stdin, _LENGTH.pack(len(request)) + request)
            length = _LENGTH.unpack(_read(stdout, _LENGTH.size, late))[0]
            if length > _MAX_BYTES:
                self.close()
                return Answer("memory")
            return msgspec.msgpack.decode(_read(stdout, length, late), type=Answer)
        except TimeoutError:
            self.close()
            return Answer("time")
        except (EOFError, OSError, ValueError, msgspec.DecodeError):
            code = self.close()
        return Answer("time") if code == -signal.SIGXCPU else Answer("ended", f"exit code {code}")

    def close(self) -> int:
        """End the process and return its exit code."""
        self._end()
        return self._process.returncode


def serve(answer: Callable[[Any], Answer], seconds: int) -> None:
    """Answer requests until there are no more. seconds: of CPU time for one; more end the process by SIGXCPU."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        while (request := _receive(requests)) is not None:
            limit = int(time.process_time()) + 1 + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            _send(answers, _caught(answer, request))


def confine(memory_bytes: int, files: bool = False) -> None:
    """Bound the memory of this process beyond what it has now. Without `files` it can open none, nor fork or import."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, held + memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    if not files:
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
            _limit(kind, 0)


def _caught(answer: Callable[[Any], Answer], request: Any) -> Answer:
    try:
        return answer(request)
    except ImportError as error:
        return Answer("unusable", str(error))
    except MemoryError:
        return Answer("memory")
    except RecursionError:
        return Answer("failed", "RecursionError: it calls itself without an end")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Answer("failed", f"{type(error).__name__}: {lines[0]}")


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _receive(file: BinaryIO) -> Any:
    """Return the next request, or None at the end."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return msgspec.msgpack.decode(file.read(_LENGTH.unpack(head)[0]))


def _send(file: BinaryIO, answer: Answer) -> None:
    try:
        data = msgspec.msgpack.encode(answer)
    except MemoryError:
        data = msgspec.msgpack.encode(Answer("memory"))
    except UnicodeEncodeError as error:
        data = msgspec.msgpack.encode(Answer("failed", str(error)))
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def _ended(process: subprocess.Popen) -> None:
    """End a process: by the end of its input, else by force."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.stdout.close()
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return what Python needs of the environment: nothing of MPI, and no secrets."""
    python = (name for name in os.environ if name.startswith("PYTHON"))
    return {name: os.environ[name] for name in (*_ENVIRONMENT, *python) if name in os.environ}


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read(file: int, size: int, late: float) -> bytes:
    """Read `size` bytes. Raises EOFError, or TimeoutError at the monotonic time `late`."""
    data, poll = bytearray(), select.poll()
    poll.register(file, select.POLLIN)
    while len(data) < size:
        # After the time is up it gets a second more: this process may have been stopped.
        if not poll.poll(max(late - time.monotonic(), 0) * 1000) and not poll.poll(1000):
            raise TimeoutError
        part = os.read(file, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
