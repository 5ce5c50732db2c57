"""Model directories that are damaged, absurd or hostile: each ends soon, by a message that names the file."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdecode.system.model_path import demo_directory
from tests.hostile.damage import INDEX, WEIGHTS, edit, entry, fifo, folder, link, safetensors, write
from tests.hostile.trial import OK, REFUSED, ROW, ROW_ERRORS, Trial, each

pytestmark = pytest.mark.full

ADDRESS_SPACE = 8 << 30  # bytes that the command may map
SECONDS = 90  # what a trial may take on a machine that is shared; most take 3 on one of its own
COMMAND = ("generate", "p.jsonl", "--model", "m", "--dtype", "float32", "--max-tokens", 4, "--kv-memory", "16M")
COMMAND += ("-o", "out.h5")
RAN = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"  # code that must never run


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def no_code_ran(directory: Path, _: Any) -> None:
    assert not list(directory.rglob("ran"))


def trial(name: str, damage: Callable[[Path], Any], says: str, **options: Any) -> Trial:
    """Return a trial of the shipped model after `damage`, called with its copied directory."""

    def arrange(directory: Path) -> dict[str, Any]:
        shutil.copytree(demo_directory() / "model", directory / "m")
        (directory / "p.jsonl").write_text(ROW)
        damage(directory / "m")
        return {"preexec_fn": limit_memory}

    return Trial(name, arrange, COMMAND, says=says, **{"check": no_code_ran, "seconds": SECONDS, **options})


def indexed(name: Any) -> Callable[[Path], None]:
    """Return what writes an index in which one tensor lies in the file `name`."""
    return write(INDEX, json.dumps({"weight_map": {"model.norm.weight": name}}))


def outside(model: Path) -> None:
    shutil.move(model / WEIGHTS, model.parent / WEIGHTS)
    indexed(f"../{WEIGHTS}")(model)


def blob(model: Path) -> None:
    """As the hub's cache keeps files: links to blobs that lie elsewhere."""
    (model.parent / "blobs").mkdir()
    for file in list(model.iterdir()):
        shutil.move(file, model.parent / "blobs" / file.name)
        file.symlink_to(f"../blobs/{file.name}")


def millions(model: Path) -> None:
    entries = {f"t{i}": f"f{i % 1000}.safetensors" for i in range(3_000_000)}
    write(INDEX, json.dumps({"weight_map": entries}))(model)


IS_INDEX = r"index\.json.*(is not a safetensors index|expected names of files in its own directory)"
INDEXES = [
    trial("index: a file above the directory", outside, IS_INDEX),
    trial("index: an absolute name", indexed("/etc/passwd"), IS_INDEX),
    trial("index: up and down again", indexed(f"sub/../../m/{WEIGHTS}"), IS_INDEX),
    trial("index: an empty name", indexed(""), IS_INDEX),
    trial("index: a NUL in a name", indexed("a\0b"), IS_INDEX),
    trial("index: a number for a name", indexed(7), IS_INDEX),
    trial("index: a list", write(INDEX, '{"weight_map": []}'), IS_INDEX),
    trial("index: nothing in it", write(INDEX, ""), IS_INDEX),
    trial("index: deep", write(INDEX, '{"weight_map":' + "[" * 1_000_000), IS_INDEX),
    trial("index: a pipe", fifo(INDEX), r"index\.json"),
    trial("index: a directory", folder(INDEX), IS_INDEX),
    trial("index: names no file that is there", indexed("none.safetensors"), "lacks 1 of 1 weight files"),
    trial("index: a name of 100,000 characters", indexed("x" * 100_000), "."),
    trial("index: millions of entries", millions, "lacks 1000 of 1000 weight files"),
    trial("index: names one tensor of all", indexed(WEIGHTS), "|", code=OK),
    trial("links to blobs elsewhere", blob, "", code=OK),
]

NORM = "model.norm.weight"
IS_WEIGHTS = r"model\.safetensors.*(truncated or not safetensors|lacks|expected)"
HEADERS = [
    trial("weights: empty", write(WEIGHTS, b""), IS_WEIGHTS),
    trial("weights: a header of 2^63 bytes", write(WEIGHTS, safetensors({}, length=1 << 63)), IS_WEIGHTS),
    trial("weights: a header longer than the file", write(WEIGHTS, safetensors({}, length=1 << 20)), IS_WEIGHTS),
    trial("weights: a header that is no JSON", write(WEIGHTS, safetensors(b"\xff" * 64)), IS_WEIGHTS),
    trial("weights: a deep header", write(WEIGHTS, safetensors(b'{"a":' * 500_000)), IS_WEIGHTS),
    trial(
        "weights: offsets beyond the file",
        write(WEIGHTS, safetensors({NORM: entry("F32", [1 << 40], 0, 1 << 42)})),
        IS_WEIGHTS,
    ),
    trial(
        "weights: overlapping tensors",
        write(WEIGHTS, safetensors({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12))),
        IS_WEIGHTS,
    ),
    trial(
        "weights: a shape that overflows",
        write(WEIGHTS, safetensors({NORM: entry("F32", [1 << 62, 1 << 62], 0, 8)}, bytes(8))),
        IS_WEIGHTS,
    ),
    trial("weights: an unknown dtype", write(WEIGHTS, safetensors({NORM: entry("F3", [1], 0, 1)}, b"0")), IS_WEIGHTS),
    trial("weights: no tensor", write(WEIGHTS, safetensors({})), "lacks"),
    trial("weights: a pipe", fifo(WEIGHTS), "pipe or a device"),
    trial("weights: a device", link(WEIGHTS, "/dev/zero"), "pipe or a device"),
    trial("weights: a directory", folder(WEIGHTS), "holds no weights"),
    trial("weights: a link to nowhere", link(WEIGHTS, "nowhere"), "holds no weights"),
]


def sized(**values: Any) -> Callable[[Path], None]:
    return edit("config.json", **values)


def custom_code(model: Path) -> None:
    (model / "evil.py").write_text(RAN + "class Evil: pass\n")
    edit("config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})(model)
    edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})(model)


def only_custom_code(model: Path) -> None:
    custom_code(model)
    edit("config.json", model_type="evil", architectures=["Evil"])(model)


def custom_tokenizer(model: Path) -> None:
    custom_code(model)
    edit("tokenizer_config.json", tokenizer_class="Evil")(model)


IS_SIZE = r"config\.json: .*expected an integer from"
SIZES = {
    "hidden_size": [10**9, 0, -64, "64", 64.5, True, [64], {"a": 1}],
    "num_hidden_layers": [10**6, -1, 0, "two"],
    "num_attention_heads": [-4, 0, 10**6],
    "num_key_value_heads": [-1, 0],
    "vocab_size": [0, -1, 10**12, "many"],
    "intermediate_size": [10**12, -5],
    "max_position_embeddings": [10**18, 0, "long"],
    "head_dim": [0, -8, 10**7],
}
CONFIGS = [
    *(
        trial(f"config: {k} {v!r}", sized(**{k: v}), IS_SIZE if v != [64] else ".")
        for k, vs in SIZES.items()
        for v in vs
    ),
    trial("config: heads that do not divide", sized(num_attention_heads=7, num_key_value_heads=3), r"hpcdecode: error"),
    trial("config: other sizes than the weights'", sized(hidden_size=384), r"config\.json asks for"),
    trial("config: 1,000 layers", sized(num_hidden_layers=1000), "states 1000 layers, the weights have 5"),
    trial("config: NaN", sized(rms_norm_eps=float("nan")), "rms_norm_eps: expected a finite number, got nan"),
    trial("config: infinity", sized(rope_theta=float("inf")), "rope_theta: expected a finite number, got inf"),
    trial("config: text for an epsilon", sized(rms_norm_eps="small"), r"config\.json|not supported"),
    trial("config: layer_types of another length", sized(layer_types=["full_attention"]), "layer_types: expected"),
    trial("config: layer_types of numbers", sized(layer_types=[1, 2, 3, 4, 5, 6]), "layer_types|layer 0"),
    trial(
        "config: 10 MB of lists in lists", write("config.json", '{"a":' + "[" * 10_000_000), r"config\.json: expected a"
    ),
    trial("config: 100 MB", write("config.json", '{"a": "' + "x" * 100_000_000 + '"}'), r"config\.json: expected a"),
    trial("config: an unknown activation", sized(hidden_act="nobody"), "not supported|cannot be used"),
    trial("config: rope parameters of text", sized(rope_parameters="yes"), "rope_parameters: expected an object"),
    trial("config: text_config a list", sized(text_config=[1]), "text_config: expected an object"),
    trial("config: model_type a list", sized(model_type=["llama"]), "model_type: expected text"),
    trial("config: architectures a number", sized(architectures=7), "architectures: expected a list"),
    trial("config: dtype a list", sized(dtype=["float32"]), "dtype: expected text"),
    trial(
        "config: a path for a model",
        sized(_name_or_path="/etc", model_type="../../evil", architectures=["../../evil"]),
        r"config\.json|not supp",
    ),
    trial("config: a tower of a million layers", sized(vision_config={"depth": 10**6}), IS_SIZE),
    trial("config: a pipe", fifo("config.json"), "pipe or a device|config"),
    trial("config: a directory", folder("config.json"), r"config\.json"),
    trial("config: code of its own beside a known type", custom_code, "", code=(OK, REFUSED)),
    trial("config: code of its own alone", only_custom_code, r"cannot be used|not supported|tokenizer"),
]


def nested_tokenizer(model: Path) -> None:
    file = model / "tokenizer.json"
    own = json.loads(file.read_text())
    own["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(" * 1_000_000},
        "behavior": "Isolated",
        "invert": False,
    }
    file.write_text(json.dumps(own))


def slow_regex(model: Path) -> None:
    file = model / "tokenizer.json"
    own = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated", "invert": False}
    own["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, own["pre_tokenizer"]]}
    file.write_text(json.dumps(own))
    (model.parent / "p.jsonl").write_text(json.dumps({"prompt": "a" * 1000, "max_tokens": 2}) + "\n")


def far_ids(model: Path) -> None:
    file = model / "tokenizer.json"
    own = json.loads(file.read_text())
    far = {token: i + 10**6 for token, i in own["model"]["vocab"].items()}
    own["model"]["vocab"] = far
    file.write_text(json.dumps(own))


def half(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        write(name, content[: len(content) // 2])(model)

    return change


IS_TOKENIZER = r"tokenizer.*expected"
IS_EOS = r"generation_config\.json: eos_token_id: expected token ids in \[0, "
TOKENIZERS = [
    trial("tokenizer: truncated", half("tokenizer.json"), IS_TOKENIZER),
    trial("tokenizer: a list", write("tokenizer.json", "[]"), IS_TOKENIZER),
    trial("tokenizer: deep", write("tokenizer.json", '{"a":' + "[" * 10_000_000), IS_TOKENIZER),
    trial("tokenizer: a regex of a million brackets", nested_tokenizer, IS_TOKENIZER),
    trial("tokenizer: a regex that takes forever", slow_regex, ".", code=(OK, ROW_ERRORS, REFUSED)),
    trial(
        "tokenizer: ids beyond the embedding",
        far_ids,
        "errors 1",
        code=ROW_ERRORS,
    ),
    trial("tokenizer: a pipe", fifo("tokenizer.json"), "tokenizer|pipe"),
    trial("tokenizer: another file is a pipe", fifo("special_tokens_map.json"), "pipe or a device"),
    trial("tokenizer: code of its own", custom_tokenizer, IS_TOKENIZER, code=(OK, REFUSED)),
    trial(
        "tokenizer: settings of 100 MB",
        write("tokenizer_config.json", '{"a": "' + "x" * 100_000_000 + '"}'),
        "expected a",
    ),
    *(
        trial(f"generation: eos {value!r}", edit("generation_config.json", eos_token_id=value), IS_EOS)
        for value in ("</s>", -1, 10**12, 1.5, True, [1, "2"], [[1]], {"a": 1})
    ),
    trial("generation: a pipe", fifo("generation_config.json"), "pipe or a device"),
    trial("generation: no eos at all", edit("generation_config.json", eos_token_id=[]), "", code=OK),
]


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def pickles(model: Path) -> None:
    import pickle

    for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "consolidated.00.pth"):
        (model / name).write_bytes(pickle.dumps(Bomb(model / "ran")))


def only_pickles(model: Path) -> None:
    pickles(model)
    (model / WEIGHTS).unlink()


PICKLES = [
    trial("pickles beside the weights", pickles, "", code=OK),
    trial("pickles alone", only_pickles, "expected safetensors"),
]


@each([*INDEXES, *HEADERS, *CONFIGS, *TOKENIZERS, *PICKLES])
def test_hostile_models(trial, hpcdecode, tmp_path):
    trial.run(hpcdecode, tmp_path)
