"""A process that has imported torch and transformers, and forks a child for every command that is asked of it.

Most commands of the tests compute for less time than these imports take. A child is a process of its own, with its own
arguments, environment, directory, streams and exit code; only the imports are shared. Modules that start MPI are not
imported here, and libraries read their environment variables here, so a command with other ones needs a new process.

usage: python -m tests.support.forkserver SOCKET
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import BinaryIO

from tests.support.forked_rank import OF_LAUNCHER, OF_NODE

ROOT = Path(__file__).parents[2]
IMPORTS = (
    *("h5py", "jinja2", "networkx", "safetensors", "tqdm", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.llama.modeling_llama", "torch.export._trace", "sympy.tensor.tensor"),  # of those that trace
    *("hpcdecode.cli.generate", "hpcdecode.generate", "hpcdecode.model.frontend.trace"),
)


class ForkServer:
    """The server, as the tests see it. It ends with them."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment
        self._folder = TemporaryDirectory(prefix="forkserver")
        self._address = f"{self._folder.name}/socket"
        line = [sys.executable, "-m", "tests.support.forkserver", self._address]
        streams = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        self._server = subprocess.Popen(line, cwd=ROOT, env=environment, **streams, start_new_session=True)
        if self._server.stdout.readline() != b"ready\n":
            raise RuntimeError(self._server.stderr.read().decode())

    def run(
        self, arguments: list[str], directory: Path, environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        """Run `hpcdecode ARGUMENTS` to its end; raises TimeoutExpired, with its output, after it was killed."""
        request = {
            "module": "hpcdecode",
            "arguments": arguments,
            "directory": str(directory),
            "environment": environment,
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        with socket.socket(socket.AF_UNIX) as connection, _streams() as (stdin, stdout, stderr):
            connection.connect(self._address)
            socket.send_fds(connection, [b"."], [stdin.fileno(), stdout.fileno(), stderr.fileno()])
            with connection.makefile("rw") as channel:
                channel.write(json.dumps(request) + "\n")
                channel.flush()
                pid = int(channel.readline())
                connection.settimeout(timeout)
                try:
                    status = int(channel.readline())
                except TimeoutError:
                    os.killpg(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(arguments, timeout, _text(stdout), _text(stderr)) from None
            return subprocess.CompletedProcess(arguments, status, _text(stdout), _text(stderr))

    def rank(self, module: str) -> list[str]:
        """Return the command of a rank under mpiexec that runs a module; its arguments follow."""
        return [sys.executable, "-S", "-E", str(ROOT / "tests" / "support" / "forked_rank.py"), self._address, module]

    def end(self) -> None:
        """Stop the server; commands that run go on."""
        self._server.kill()
        self._server.communicate()
        self._folder.cleanup()


@contextmanager
def _streams() -> Iterator[list[BinaryIO]]:
    """Open standard input, output and error of a command: nothing, and two empty files."""
    with open(os.devnull, "rb") as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        yield [stdin, stdout, stderr]


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


def serve(address: str) -> dict:
    """Fork for every request; returns it in the child that is to carry it out."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that watch the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            asked, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in asked:
                sys.exit(0)  # those that asked are gone
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _watch(connection)
            connection.close()


def _watch(connection: socket.socket) -> dict:
    """Fork the child of one request and report its process id and its exit status; end it if nobody waits any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 4 + len(OF_NODE))
    with connection.makefile("rw") as channel:
        request = json.loads(channel.readline())
        pid = os.fork()
        if pid == 0:
            os.setsid()
            return _become(request, streams)
        channel.write(f"{pid}\n")
        channel.flush()
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(pid)
        if ended not in select.select([connection, ended], [], [])[0]:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            channel.write(f"{os.waitstatus_to_exitcode(status)}\n")
            channel.flush()
    os._exit(0)


def _become(request: dict, streams: list[int]) -> dict:
    """Take on the streams, the node, the directory, the CPUs and the environment of a request; returns it."""
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    of_node, of_launcher = streams[3 : 3 + len(OF_NODE)], streams[3 + len(OF_NODE) :]
    for kind, space in zip(OF_NODE, of_node, strict=False):  # a process alone is of this node
        if os.fstat(space).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino and ctypes.CDLL(None).setns(space, 0):
            raise OSError(f"the {kind} namespace of a node cannot be entered")
        os.close(space)
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["cpus"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for descriptor in of_launcher:
        os.environ[OF_LAUNCHER] = str(descriptor)
    return request


def main(address: str) -> int:
    from hpcdecode.cli import main as hpcdecode
    from hpcdecode.system.cores import set_libraries

    set_libraries(1)
    for name in IMPORTS:
        __import__(name)
    assert "mpi4py.MPI" not in sys.modules
    gc.collect()
    gc.freeze()
    request = serve(address)
    sys.argv = [request["module"], *request["arguments"]]
    if request["module"] == "hpcdecode":
        return hpcdecode()
    return runpy.run_module(request["module"], run_name="__main__", alter_sys=True) and 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
