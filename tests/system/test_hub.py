"""Names of the Hugging Face hub: found in its local cache, or said in one line with the command that downloads them."""

from __future__ import annotations

import json
import os
import shlex

import pytest

from hpcdecode import LLM, SamplingParams
from hpcdecode.data.prompts.batch_format import model_names
from hpcdecode.errors import UserError
from hpcdecode.system.hub import hub_cache
from hpcdecode.system.model_path import find_model

OLD, NEW = "0" * 40, "1" * 40
WHOLE = {"config.json": "{}", "model.safetensors": "weights"}
SHARDS = {"config.json": "{}", "a.safetensors": "", "model.safetensors.index.json": None}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of its own; called, it puts a snapshot there as the hub's client does: links to blobs, and a ref."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def put(files, commit=NEW, ref="main", name="models--org--Name-7B"):
        folder = tmp_path / "hub" / name
        snapshot = folder / "snapshots" / commit
        for place in (snapshot, folder / "blobs", (folder / "refs" / (ref or "")).parent):
            place.mkdir(parents=True, exist_ok=True)
        if ref:
            (folder / "refs" / ref).write_text(commit)
        for file, content in files.items():
            blob = folder / "blobs" / f"{commit[:4]}-{file.replace('/', '-')}"
            blob.write_bytes(content if isinstance(content, bytes) else content.encode())
            (snapshot / file).parent.mkdir(exist_ok=True)
            (snapshot / file).symlink_to(os.path.relpath(blob, (snapshot / file).parent))
        return snapshot

    return put


def refusal(model, **options):
    with pytest.raises(UserError) as error:
        find_model(model, {}, **options)
    assert "\n" not in str(error.value) and not error.value.everywhere  # the lead's cache decides, before others look
    return str(error.value)


def test_snapshots_are_found_by_branch_tag_and_commit(hub):
    old, new = hub(WHOLE, OLD, "v1.0"), hub(WHOLE)
    pull = hub(WHOLE, "2" * 40, "refs/pr/1")
    assert find_model("org/Name-7B", {}) == find_model("org/Name-7B@main", {}) == str(new)
    assert find_model(None, {"HPCDECODE_MODEL": f"org/Name-7B@{NEW}"}) == str(new)
    assert find_model("org/Name-7B@v1.0", {}) == find_model(f"org/Name-7B@{OLD}", {}) == str(old)
    assert find_model("org/Name-7B@refs/pr/1", {}) == str(pull)
    assert "Name-7B" in model_names(find_model("org/Name-7B", {}))  # requests of batch files may name it
    assert find_model("gpt2", {}) == "gpt2"
    gpt2 = hub(WHOLE, name="models--gpt2")
    assert find_model("gpt2", {}) == str(gpt2)


def test_paths_are_paths(hub, tmp_path):
    hub(WHOLE)
    (tmp_path / "org" / "Name-7B").mkdir(parents=True)
    assert find_model("org/Name-7B", {}) == "org/Name-7B"
    for path in ("./org/other", "/org/other", "models/of/mine", "org/x.gguf", "../org/x"):
        assert find_model(path, {}) == path


def test_what_is_not_there_is_said_with_the_command_that_gets_it(hub, tmp_path):
    said = refusal("org/Name-7B")
    assert f"({tmp_path / 'hub'}), found neither: hf download org/Name-7B" in said
    assert shlex.split(refusal("org/Name-7B@v2"))[-5:] == ["hf", "download", "org/Name-7B", "--revision", "v2"]
    hub(WHOLE, OLD, "v1.0")
    assert refusal("org/Name-7B").endswith("found v1.0, " + OLD + ": hf download org/Name-7B, or use --model "
                                           "org/Name-7B@v1.0")  # fmt: skip
    assert "expected a branch, a tag or a commit after @" in refusal("org/Name-7B@a/../../../b")
    (tmp_path / "hub" / "models--org--Name-7B" / "refs" / "main").write_text("../../..")
    assert "expected revision main" in refusal("org/Name-7B")


@pytest.mark.parametrize(
    "files, lost, lacks",
    [
        ({**SHARDS, "model.safetensors.index.json": ["a.safetensors", "b.safetensors"]}, [], "lacks b.safetensors: "),
        ({**SHARDS, "model.safetensors.index.json": ["a.safetensors"]}, ["a.safetensors"], "content of a.safetensors"),
        (WHOLE, ["config.json"], "lacks the content of config.json: "),
        ({"tokenizer.json": "{}", "model.safetensors": ""}, [], "lacks config.json: "),
        ({"config.json": "{}"}, [], "lacks the weights: "),
    ],
)
def test_a_download_that_is_not_whole_is_refused(hub, files, lost, lacks):
    index = files.get("model.safetensors.index.json")
    text = {} if index is None else {"model.safetensors.index.json": json.dumps({"weight_map": {n: n for n in index}})}
    snapshot = hub({**files, **text})
    for name in lost:
        (snapshot / name).resolve().unlink()
    said = refusal("org/Name-7B")
    assert lacks in said and said.endswith(": hf download org/Name-7B")
    if "weights" in lacks or "lacks b" in lacks:
        assert find_model("org/Name-7B", {}, weights=False) == str(snapshot)  # plan and split read no weights


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": ["b"], "c": "\\u0000"}}'])
def test_a_damaged_index_is_left_to_its_reader(hub, index):
    snapshot = hub({**WHOLE, "model.safetensors.index.json": index})
    assert find_model("org/Name-7B", {}) == str(snapshot)


def test_one_gguf_file_is_the_model_and_of_several_one_is_to_be_named(hub):
    parts = {f"q/m-{i:05}-of-00002.gguf": "x" for i in (1, 2)}
    snapshot = hub({"config.json": "{}", **parts, "m.gguf": "x"})
    said = refusal("org/Name-7B")
    assert f"got m.gguf, q/m-00001-of-00002.gguf: give one: --model {snapshot}/m.gguf" in said
    (snapshot / "m.gguf").unlink()
    assert find_model("org/Name-7B", {}, weights=False) == str(snapshot / "q" / "m-00001-of-00002.gguf")
    alone = hub({"m.gguf": "x"}, name="models--org--other-GGUF")
    assert find_model("org/other-GGUF", {}) == str(alone / "m.gguf")


def test_the_cache_is_where_the_hub_s_client_has_it(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(hub_cache()) == "/x/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub_cache() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "$HOME/of/all")
    assert hub_cache() == tmp_path / "of" / "all"


def test_a_model_of_the_cache_generates(hub, checkpoint):
    """Through links to blobs, whose names have no endings, as the hub's client makes them."""
    folder = checkpoint("llama3")
    hub({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    options = {"dtype": "float32", "batch": 2, "kv_memory": "1M", "threads": 1}
    made = [
        LLM(model, **options).generate("a b", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
        for model in ("org/Name-7B", folder)
    ]
    assert made[0] == made[1] and made[0]
