"""Every command, program and row of the README, the usage page and the Slurm page does what it says, with a tiny model.

What cannot run here is listed with its reason; a command that is neither listed nor works fails. Of `srun` and `sbatch`
what they start is run, by one process: tests/slurm has the scripts on a real Slurm.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
import subprocess

import h5py
import msgspec
import pytest

from hpcdecode.cli import parse
from tests.support.commands import ROOT
from tests.support.documents import shown
from tests.support.profiles import LLAMA_8B_CONFIG, profile, write

MODEL = "/models/Llama-3.1-8B"  # of the documents
LAYERS = 3  # of the tiny model
ROWS = [{"id": name, "prompt": f"The {name}", "max_tokens": 3} for name in ("a1", "b", "c", "d", "e")]
NOT_RUN = {  # commands by the beginning of their text
    "hpcdecode generate -p": "downloads 93 MB: tests/real runs it",
    "hpcdecode split smollm2": "the same",
    "hpcdecode bench e2e --workload": "takes minutes: tests/bench/test_e2e.py",
    "hpcdecode bench swap": "writes and reads a disk for a while: tests/mpi/test_benches.py",
    "hpcdecode serve --model": "does not end by itself: tests/serve/test_process.py",
    "pip install": "installs hpcdecode, as `make test` has done",
    "python3 -m venv": "the same",
    "module load": "a cluster's own",
    "salloc": "asks Slurm for nodes",
    "mpiexec --with-ft ulfm": "needs Open MPI: tests/mpi/test_survive.py",
    "srun -K --mpi=pmi2 --ntasks-per-node=2 --cpu-bind=ldoms hpcdecode calibrate": "takes 10 s: test_simulate_command",
}
BENCHES = {  # which take minutes
    *("attention", "prefill", "recurrent", "products", "exchange"),
    *("pipeline", "routes", "e2e", "planner", "gpu", "accuracy", "swap", "rotation", "steps", "guesses"),
}
PLACEHOLDERS = {
    "PROMPTS": "prompts.jsonl",
    "OUT.h5": "out.h5",
    "PART.h5": "prompts.*-of-2.h5",
    "OUT.h5|TRACE.json": "out.h5",
    "MODEL": MODEL,
    "[ROW": "1",
    "...]": "2-3",
    "...": "",
}


class Reader:
    """Does what a document says, in a directory with prompts."""

    def __init__(self, hpcdecode, folder, tiny):
        self.hpcdecode, self.folder, self.tiny = hpcdecode, folder, tiny
        (folder / "llama").mkdir()
        (folder / "llama" / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        demo = profile(1)
        cost = msgspec.structs.replace(demo.cost, layers=LAYERS)
        write(folder / "job.json", msgspec.structs.replace(demo, cost=cost))

    def command(self, text, output=""):
        """Run a command; what it prints is `output`, unless that is empty."""
        text = text.replace("merge OUT.h5", "merge prompts.h5")
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text, comments=True)]
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.hpcdecode.environment[name] = value.replace(MODEL, str(self.tiny))
        elif script := re.search(r"slurm/\w+\.sbatch", text):
            subprocess.run(["bash", "-n", ROOT / script[0]], check=True)
            end = words.index(script[0]) if script[0] in words else len(words) - 2
            assert parse(["generate", *(word.rstrip(")") for word in words[end + 1 :])], speak=True)
        elif "--wrap" in words:
            self.shards(4)
            self.command(words[words.index("--wrap") + 1])
        else:
            assert words[0] in ("hpcdecode", "srun", "mpiexec"), f"{text}: run it here, or list it in NOT_RUN"
            self.run([w for w in words[words.index("hpcdecode") + 1 :] if w], 2 if words[0] == "mpiexec" else 1, output)

    def run(self, words, ranks, output):
        command, *arguments = words
        model = self.folder / "llama" if command == "plan" else self.tiny
        arguments = [str(model) if word == MODEL else word for word in arguments]
        arguments = [file for word in arguments for file in (self.files(word) if "*" in word else [word])]
        if ranks > 1 or command in ("merge", "score"):  # which find nothing to do, or another job
            (self.folder / "prompts.h5").unlink(missing_ok=True)
        result = self.hpcdecode(command, *arguments, ranks=ranks)
        assert result.returncode in ((0, 1) if command == "doctor" else (0,)), f"{words}: {result.stderr}"
        if output:
            assert result.stdout.split() == output.split()

    def files(self, pattern):
        return sorted(glob.glob(pattern, root_dir=self.folder))

    def shards(self, count):
        """Do what the array of jobs does."""
        for path in self.files("prompts*.h5"):
            (self.folder / path).unlink()
        for i in range(count):
            self.run(["generate", "prompts.jsonl", "--shard", f"{i}/{count}"], 1, "")

    def program(self, text):
        exec(compile(text.replace(MODEL, str(self.tiny)), "document", "exec"), {})


@pytest.fixture
def reader(hpcdecode, forkserver, tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hpcdecode.environment = dict(forkserver.environment)  # programs of another test have changed this process's own
    return Reader(hpcdecode, tmp_path, checkpoint("llama2"))


def left_out(text):
    return next((begin for begin in NOT_RUN if text.startswith(begin)), None)


def read(reader, name):
    """Do what a document says; return which of NOT_RUN were left out."""
    found = set()
    for kind, text, output in shown((ROOT / name).read_text()):
        if kind == "json":
            text = text.replace('" yes", " no"', '"a", "b"')  # which are tokens of the tiny model
            (reader.folder / "row.jsonl").write_text(text)
            command = "score" if '"continuations"' in text else "generate"
            reader.command(f"hpcdecode {command} row.jsonl -o row.h5 --model {MODEL}")
            (reader.folder / "row.h5").unlink()
        elif kind == "python":
            reader.program(text)
        elif begin := left_out(text):
            found.add(begin)
        elif kind == "command":
            reader.command(text, output)
        elif not re.match(r"(mpiexec -n 2 )?hpcdecode (bench )?\w+$", text):  # a name alone is tested below
            reader.command(text)
    return found


def test_the_readme(reader, capsys):
    assert read(reader, "README.md") == {"hpcdecode generate -p", "hpcdecode bench e2e --workload", "pip install"}
    with h5py.File(reader.folder / "prompts.h5") as file:
        assert file.attrs["complete"] and len(file["rows/line"]) == len(ROWS)
    assert {"prompts.results.jsonl", "run.html", "out.h5"} <= {path.name for path in reader.folder.iterdir()}
    assert capsys.readouterr().out.count("The ") >= len(ROWS)


def test_the_slurm_page(reader, capsys):
    left = read(reader, "docs/slurm.md")
    assert left == {begin for begin in NOT_RUN if not begin.startswith("hpcdecode")}
    assert "True 5" in capsys.readouterr().out


def test_the_usage_page(reader):
    reader.hpcdecode.environment["HPCDECODE_MODEL"] = str(reader.tiny)
    reader.command("hpcdecode generate prompts.jsonl -o out.h5")
    reader.shards(2)
    assert read(reader, "docs/usage.md") == {
        "hpcdecode split smollm2",
        "hpcdecode serve --model",
        "hpcdecode bench swap",
    }


def test_subcommands_exist(capsys):
    """Those that documents name without arguments; and the table has all that there are."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/usage.md", "docs/slurm.md")]
    lines = [item.text for page in pages for item in shown(page) if item.kind == "inline"]
    names = {match[1] for line in lines if (match := re.search(r"hpcdecode ((bench )?\w+)", line))}
    assert {name.removeprefix("bench ") for name in names if name.startswith("bench ")} == BENCHES
    for name in names:
        if name.startswith("bench "):
            assert parse(name.split(), speak=True).name == name.removeprefix("bench ")
            continue
        with pytest.raises(SystemExit) as end:
            parse([name, "--help"], speak=True)
        assert end.value.code == 0, name
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse(["--help"], speak=True)
    listed = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.M)
    assert {name.split()[0] for name in names} == set(listed)
