"""A GGUF file with an adapter: replicas, groups and later runs of a job make the rows of one process."""

from __future__ import annotations

import json

import h5py
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support.gguf_files import write

FLAGS = ("--max-tokens", 12, "--dtype", "float32", "--ignore-eos")


@pytest.fixture
def job(checkpoint, tmp_path):
    """The arguments of a job with a GGUF file, and those of its adapter."""
    model = checkpoint("llama2")
    file = write(model, tmp_path, "llama", lambda name: "Q8_0", parts=2).file
    rows = ({"prompt_token_ids": [7 * i + j + 2 for j in range(5 + i)]} for i in range(10))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.05)
    made.save_pretrained(tmp_path / "adapter")
    return ("generate", "p.jsonl", "--model", file, *FLAGS), ("--lora", "adapter")


def tokens(path):
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        return file["rows/token_ids"][:].tolist()


def test_all_layouts_and_a_later_run(hpcdecode, tmp_path, job):
    line, lora = job
    runs = {"plain": ((), 1), "one": (lora, 1), "two": (lora, 2), "tp": ((*lora, "--tp", 2), 2)}
    runs["split"] = ((*lora, "--layout", "split"), 2)
    for name, (flags, ranks) in runs.items():
        result = hpcdecode(*line, *flags, "-o", f"{name}.h5", ranks=ranks)
        assert result.returncode == 0, result.stderr
    found = {name: tokens(tmp_path / f"{name}.h5") for name in runs}
    assert found["plain"] != found["one"]
    assert found["one"] == found["two"] == found["tp"] == found["split"]
    assert hpcdecode(*line, *lora, "-o", "later.h5", "--limit", 4).returncode == 0
    result = hpcdecode(*line, "-o", "later.h5")
    assert result.returncode == 2 and "lora changed" in result.stderr, result.stderr
    result = hpcdecode(*line, *lora, "-o", "later.h5")
    assert result.returncode == 0, result.stderr
    assert tokens(tmp_path / "later.h5") == found["one"]
