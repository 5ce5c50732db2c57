"""Files that are refused because they are something else, and folders of prompt files."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from hpcdecode.data.prompts.files import require_formats, resolve
from hpcdecode.errors import UserError
from tests.support.prompt_files import FORMATS, JSONL, ROWS, arrow, read, total, write


def zipped(name: str, content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        file.writestr(name, content)
    return sink.getvalue()


def tarred() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as file:
        file.addfile(tarfile.TarInfo("p.jsonl"))
    return sink.getvalue()


def safetensors() -> bytes:
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return len(header).to_bytes(8, "little") + header + bytes(4)


FOREIGN = {
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(50), "a PNG image"),
    "zip": (zipped("p.jsonl", JSONL), "a zip archive"),
    "tar": (tarred(), "a tar archive"),
    "tar.gz": (gzip.compress(tarred()), "a tar archive"),
    "gz of gz": (gzip.compress(gzip.compress(JSONL)), "a file that is packed twice"),
    "safetensors": (safetensors(), "a safetensors file"),
    "pickle": (b"\x80\x04\x95" + bytes(20), "a Python pickle, which is not read"),
    "pdf": (b"%PDF-1.7\n", "a PDF document"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), "text in UTF-16"),
    "utf-16 without mark": ('{"prompt": "a"}'.encode("utf-16le"), "text in UTF-16"),
    "binary": (bytes(range(256)), "binary data of no known format"),
    "text": (b"Tell me a story.\n", "plain text"),
    "feather 1": (b"FEA1" + bytes(20), "a Feather file of version 1"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_a_wrong_kind_is_refused_with_what_it_seems_to_be(tmp_path, name):
    data, seems = FOREIGN[name]
    for ending in ("", ".jsonl", ".csv") if name != "text" else ("", ".md"):
        path = write(tmp_path / f"p{ending}", data)
        expected = f"expected JSON Lines, a JSON array, CSV, TSV, Parquet, Arrow or HDF5, got what seems to be {seems}"
        with pytest.raises(UserError, match=re.escape(expected)):
            require_formats([str(path)])
        with pytest.raises(UserError, match=re.escape(seems)):
            read(path)


def saved(folder: Path, **state: object) -> Path:
    """A dataset as `datasets` saves it: two Arrow streams that state.json names."""
    folder.mkdir()
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, rows in zip(names, (ROWS[:2], ROWS[2:]), strict=True):
        write(folder / name, arrow(stream=True, rows=rows))
    about = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(about))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_its_files_in_order(tmp_path):
    folder = saved(tmp_path / "data")
    write(folder / "cache-1.arrow", arrow(stream=True))
    found = resolve([str(folder)])
    assert [Path(path).name for path in found] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    rows = read(*found)
    assert [(row.line, row.prompt) for row in rows] == list(enumerate((row["prompt"] for row in ROWS), 1))
    assert total(*found) == 3


def test_a_folder_of_parquet_files(tmp_path):
    for name in ("b.parquet", "a.parquet", "README.md"):
        write(tmp_path / name, FORMATS["parquet"])
    assert resolve([str(tmp_path)]) == [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]


def both(folder: Path) -> None:
    write(folder / "a.parquet", b"")
    write(folder / "a.arrow", b"")


def splits(folder: Path) -> None:
    write(folder / "dataset_dict.json", b'{"splits": ["train", "test"]}')
    saved(folder / "train")


def link(folder: Path) -> None:
    write(folder.parent / "secret.parquet", FORMATS["parquet"])
    (folder / "a.parquet").symlink_to("../secret.parquet")


def naming(*names: object) -> object:
    def arrange(folder: Path) -> None:
        write(folder.parent / "secret.arrow", FORMATS["arrow stream"])
        (folder / "out.arrow").symlink_to(folder.parent / "secret.arrow")
        (folder / "inner").mkdir()
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))

    return arrange


FOLDERS = {
    "nothing": (lambda folder: None, "found none"),
    "other files": (lambda folder: write(folder / "a.txt", b"") and None, "found none, but a.txt"),
    "a folder": (lambda folder: (folder / "data").mkdir(), "found none, but the folders data"),
    "both": (both, "found both; name the files"),
    "splits": (splits, "expected one split of this dataset; name .*train"),
    "a link": (link, "a.parquet is a link out of it; name its target"),
    "a name elsewhere": (naming("../secret.arrow"), "expected names of files in this folder, got '../secret.arrow'"),
    "an absolute name": (naming("/etc/passwd"), "expected names of files in this folder, got '/etc/passwd'"),
    "a listed link": (naming("out.arrow"), "out.arrow is a link out of it"),
    "a listed folder": (naming("inner"), "expected inner in this folder, but it is no file"),
    "a listed file that is missing": (naming("a.arrow"), "but it does not exist"),
    "no names": (naming(), "expected names of files under _data_files in state.json"),
    "names that are none": (naming(7), "expected names of files under _data_files in state.json"),
    "a deep state": (lambda folder: write(folder / "state.json", b"[" * 10**6) and None, "bytes of JSON"),
    "a large state": (lambda folder: write(folder / "state.json", b" " * (17 << 20)) and None, "bytes of JSON"),
    "indices": (
        lambda folder: write(folder / "state.json", b'{"_indices_data_files": [{"filename": "i.arrow"}]}') and None,
        "expected a dataset without indices",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_dataset_is_refused(tmp_path, name):
    arrange, says = FOLDERS[name]
    folder = tmp_path / "data"
    folder.mkdir()
    arrange(folder)
    with pytest.raises(UserError, match=f"prompt folder .*data: .*{says}"):
        resolve([str(folder)])
