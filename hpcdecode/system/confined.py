"""Work on untrusted input in a process of its own, bounded in time and memory; a crash costs one request only.

`Confined` is the side of the caller. The module that it starts calls `serve`. Requests come on standard input and
answers go to standard output, each as msgpack after its length (4 bytes, little endian), until the input ends.
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
from typing import IO, Any, BinaryIO

import msgspec

from hpcdecode.errors import UserError

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 30  # of an answer
_WALL_SECONDS = 120.0  # for an answer; the kernel ends a process that computes for longer than it may
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # meant for the job
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class Answer(msgspec.Struct, array_like=True):
    """Outcome of a request.

    Attributes:
        kind: A kind of the server's own, or `failed`, `memory` or `unusable` (a module is missing). The caller's side
            adds `time` and `ended`.
        value: Details: the exception of `failed`, the module of `unusable`, how the process of `ended` ended.
    """

    kind: str
    value: Any = None


class Confined:
    """A process that answers requests. It ends with this object, and with the process that holds this object.

    Args:
        command: Arguments of the Python interpreter, such as `-m MODULE`.
        what: Purpose of the process, for messages.

    Raises:
        UserError: If the process cannot be started.
    """

    def __init__(self, command: tuple[str, ...], what: str):
        try:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],  # a folder without files of the user
                env=_environment(),
                start_new_session=True,  # signals of a terminal are for the job
            )
        except OSError as error:
            raise UserError(f"expected a process for {what}, none can be started: {error}") from error
        self._end = weakref.finalize(self, _ended, self._process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, request: bytes) -> Answer:
        """Return the answer to a request in msgpack; of kind `time` or `ended` if the process ends instead."""
        stdin, stdout = (pipe.fileno() for pipe in _pipes(self._process))
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
    """Answer requests until the input ends.

    Args:
        answer: Returns the answer to a decoded request.
        seconds: CPU seconds for a request; SIGXCPU ends a process that takes longer.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        while (request := _receive(requests)) is not None:
            limit = int(time.process_time()) + 1 + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            _send(answers, _caught(answer, request))


def confine(memory_bytes: int, files: bool = False) -> None:
    """Limit the resources of this process.

    Args:
        memory_bytes: Bytes that it may take beyond those that it has now.
        files: Whether it may open files, fork and import from now on.
    """
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


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Return the ends of the process's standard input and output."""
    assert process.stdin is not None and process.stdout is not None, "both were asked for as pipes"
    return process.stdin, process.stdout


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a process by closing its input, or by SIGKILL if it does not end."""
    stdin, stdout = _pipes(process)
    with contextlib.suppress(OSError):
        stdin.close()
    stdout.close()
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the variables that Python needs, without those of MPI and without secrets."""
    python = (name for name in os.environ if name.startswith("PYTHON"))
    return {name: os.environ[name] for name in (*_ENVIRONMENT, *python) if name in os.environ}


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read(file: int, size: int, late: float) -> bytes:
    """Read `size` bytes.

    Raises:
        EOFError: If the file ends before.
        TimeoutError: At the monotonic time `late`.
    """
    data, poll = bytearray(), select.poll()
    poll.register(file, select.POLLIN)
    while len(data) < size:
        # One more second after the deadline: this process may have been stopped meanwhile.
        if not poll.poll(max(late - time.monotonic(), 0) * 1000) and not poll.poll(1000):
            raise TimeoutError
        part = os.read(file, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
