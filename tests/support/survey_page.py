"""The page of documentation that says which model types run, from the results of `tests.survey`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

WIDEST = 100  # characters of a line
TABLE = ("| model type | state | difference, or reason |", "|---|---|---|")

HEAD = """# Models

[usage.md](usage.md#model) says which models run and how. This is the table behind it: model types
of transformers {version} (torch {torch}), each as a small model with random weights. `make survey`
tries them all and writes this page; `python -m tests.survey TYPE ...` tries some.

- **works**: float32 logits of two sequences of 130 and 37 tokens, in three batches that share
  chunks of both, are within 1e-4 of transformers'. The number is the largest difference, in
  standard deviations of the logits where that is more than 1. Here indexers of sparse attention
  choose all tokens, those of `deepseek_v4` 8 compressed entries. Choices that leave out some are
  compared in `tests/model/test_indexers.py`.
- **refused**: a message names the reason before a weight is read.
- **not tried**: no small model that transformers itself runs on text was made of the type's config.
- **encoder-decoder**: not a decoder alone; refused.
"""


def types() -> dict[str, list[str]]:
    """Return the model types that the survey tries: causal ones, and those of images and text beside."""
    causal = list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    images = [name for name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in causal]
    return {"causal": causal, "image-text": images}


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page, in Markdown; found: state, reason and error by model type, of all types."""
    parts = [HEAD.format(version=transformers.__version__, torch=torch.__version__.partition("+")[0])]
    for kind, names in types().items():
        counts = Counter(state_of(found[name]) for name in names)
        said = ", ".join(f"{count} {state}" for state, count in counts.most_common())
        title = "Text" if kind == "causal" else "Images and text, as text"
        parts.append("\n".join([f"## {title}", "", f"{said}.", "", *TABLE, *(row(n, found[n]) for n in names), ""]))
    return "\n".join(parts)


def row(name: str, about: Mapping[str, Any]) -> str:
    """Return the line of a model type: its state, and the difference of logits or the reason in a few words."""
    begin = f"| {name} | {state_of(about)} | "
    if "error" in about:
        return f"{begin}{about['error']:.1e} |"
    reason, room = in_short(about.get("reason", "")), WIDEST - len(begin) - 2
    return f"{begin}{reason if len(reason) <= room else reason[: room - 3].rsplit(' ', 1)[0] + ' ...'} |"


def state_of(about: Mapping[str, Any]) -> str:
    """Return the state of a model type, in the page's words."""
    state: str = about["state"]
    return "not tried" if state == "no tiny model" else state


def in_short(reason: str) -> str:
    """Return what a reason says first, without the names of classes of errors around it."""
    text = " ".join(reason.replace("|", " ").split())
    text = re.sub(r"^/\S+ ", "", text)  # the folder of the checkpoint
    text = re.sub(r"^\w+: Class validation error .*?: (?=\w+: )", "", text)
    text = re.sub(r"^(torch.export cannot trace it) \((\w+): .*", r"\1 (\2)", text)
    return re.split(r"; |, which|: not supported|, For more|\. ", text)[0].replace("`", "")


def listed(text: str) -> tuple[str, list[str]]:
    """Return the version of transformers that a page is of, and the model types that it names."""
    version = re.search(r"transformers (\S+) \(", text)
    return version[1] if version else "", re.findall(r"^\| (\S+) \| [a-z]", text.replace("| model type |", ""), re.M)
