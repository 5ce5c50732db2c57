"""The files of a LoRA adapter in a directory of PEFT's format."""

from __future__ import annotations

from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_files(folder: str) -> list[Path]:
    """Return the files that an adapter's updates depend on."""
    return [path for name in (CONFIG, WEIGHTS) if (path := Path(folder) / name).is_file()]
