"""Files of clients: what is stored is whole, bounded and the client's own; damaged and strange forms are refused."""

from __future__ import annotations

import json
import os

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hpcdecode.errors import UserError
from hpcdecode.serve.errors import ApiError, add_handlers
from hpcdecode.serve.files.folder import DataFolder
from hpcdecode.serve.files.owners import owner_of
from hpcdecode.serve.files.routes import files_router
from hpcdecode.serve.files.store import FileStore

DATA = b'{"custom_id": "a"}\n'


def client_of(folder, most_bytes=1 << 20, keys=("one", "other")):
    app = FastAPI()
    add_handlers(app)
    store = FileStore(folder)
    app.include_router(files_router(store, lambda request: owner_of(request, keys), lambda file_id: None, most_bytes))
    return TestClient(app, headers={"Authorization": "Bearer one"})


def upload(client, data=DATA, name="in.jsonl", purpose="batch"):
    return client.post("/v1/files", data={"purpose": purpose}, files={"file": (name, data)})


def form(*parts: tuple[str, bytes], boundary="xyz", end=b"--") -> dict:
    """A request with a form of parts: a Content-Disposition and a content each."""
    body = b""
    for disposition, content in parts:
        head = f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n"
        body += head.encode() + content + b"\r\n"
    kind = f"multipart/form-data; boundary={boundary}"
    return {"content": body + f"--{boundary}".encode() + end + b"\r\n", "headers": {"Content-Type": kind}}


def test_upload_list_get_read_delete(tmp_path):
    client = client_of(tmp_path)
    made = [upload(client, DATA * n).json() for n in (1, 2, 3)]
    assert made[1]["bytes"] == 2 * len(DATA) and made[1]["object"] == "file" and made[1]["filename"] == "in.jsonl"
    listed = client.get("/v1/files").json()
    assert listed["data"] == made[::-1] and listed["object"] == "list" and listed["has_more"] is False
    listed = client.get("/v1/files", params={"limit": 2, "order": "asc", "purpose": "batch"}).json()
    assert listed["data"] == made[:2] and listed["has_more"] is True
    assert client.get("/v1/files", params={"after": made[1]["id"]}).json()["data"] == made[:1]
    assert client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []
    answer = client.get(f"/v1/files/{made[1]['id']}/content")
    assert answer.content == DATA * 2 and answer.headers["x-content-type-options"] == "nosniff"
    assert client.delete(f"/v1/files/{made[1]['id']}").json() == {
        "id": made[1]["id"],
        "object": "file",
        "deleted": True,
    }
    for path in (f"/v1/files/{made[1]['id']}", f"/v1/files/{made[1]['id']}/content", "/v1/files/..%2f..%2fx"):
        assert client.get(path).status_code == 404
    assert client_of(tmp_path).get("/v1/files").json()["data"] == [made[2], made[0]]
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ["", "", ".json", ".json"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\\b\\passwd", "/passwd", "passwd"])
def test_names_of_clients_name_nothing(tmp_path, name):
    made = upload(client_of(tmp_path / "files"), name=name).json()
    assert made["filename"] == "passwd"
    found = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
    assert found == [made["id"], f"{made['id']}.json"]


def test_strange_names_are_shown_on_one_line(tmp_path):
    made = upload(client_of(tmp_path), name="a\x1b[31m" + "ä" * 500).json()
    assert made["filename"].isprintable() and len(made["filename"]) <= 255


@pytest.mark.parametrize("stated", [True, False])
def test_a_file_that_is_too_large_is_refused_while_it_is_read(tmp_path, stated):
    client = client_of(tmp_path, most_bytes=1 << 20)

    def chunks():
        whole = form(('name="purpose"', b"batch"), ('name="file"; filename="x"', b"x" * (8 << 20)))["content"]
        for start in range(0, len(whole), 1 << 16):
            yield whole[start : start + (1 << 16)]

    headers = {"Content-Type": "multipart/form-data; boundary=xyz"} | ({"Content-Length": "9000000"} if stated else {})
    answer = client.post("/v1/files", content=chunks(), headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "file_too_large"
    assert "at most 1,048,576 bytes" in answer.json()["error"]["message"]
    assert list(tmp_path.iterdir()) == []
    assert upload(client, b"x" * (1 << 20)).status_code == 200


FILE = ('name="file"; filename="x"', DATA)
PURPOSE = ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"content": DATA}, "got no Content-Type"),
        ({"json": {"purpose": "batch"}}, "got application/json"),
        (form(PURPOSE), "file: expected a file, got none"),
        (form(FILE), "purpose: expected batch, got none"),
        (form(('name="purpose"', b"fine-tune"), FILE), "purpose: expected batch, got 'fine-tune'"),
        (form(PURPOSE, FILE, FILE), "file: expected it once"),
        (form(PURPOSE, FILE, ('name="expires_after[anchor]"', b"created_at")), r"expires_after[anchor]: expected"),
        (form(PURPOSE, ('name="file"; filename="x"', b"")), "got an empty file"),
        (form(('name="purpose"', b"b" * 5000), FILE), "at most 1024 bytes"),
        (form(*[(f'name="f{i}"', b"") for i in range(20)]), "got more than 8"),
        (form(PURPOSE, FILE, end=b""), "expected a form"),
        (
            {**form(PURPOSE, FILE), "headers": {"Content-Type": "multipart/form-data; boundary=other"}},
            "expected a form",
        ),
        ({**form(PURPOSE, FILE), "headers": {"Content-Type": "multipart/form-data"}}, "expected a form"),
        (
            {**form(PURPOSE, FILE), "headers": {"Content-Type": f"multipart/form-data; boundary={'b' * 500}"}},
            "expected a",
        ),
        (form((f'name="{"n" * 10000}"', b""), FILE), "expected a form"),
    ],
)
def test_strange_forms_are_refused(tmp_path, asked, message):
    answer = client_of(tmp_path).post("/v1/files", **asked)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"] and answer.json()["error"]["type"] == "invalid_request_error"
    assert list(tmp_path.iterdir()) == []


def test_what_an_interruption_leaves_is_removed_and_damage_is_left_out(tmp_path, caplog):
    client = client_of(tmp_path)
    whole, short, strange = (upload(client).json()["id"] for _ in range(3))
    (tmp_path / f"{short}").write_bytes(DATA[:-1])
    (tmp_path / f"{strange}.json").write_text(json.dumps({"id": "../x", "owner": 3}))
    (tmp_path / f"{whole}.tmp").write_bytes(b"half")
    (tmp_path / ("file-" + "0" * 24)).write_bytes(DATA)  # its upload had not ended
    assert [f["id"] for f in client_of(tmp_path).get("/v1/files").json()["data"]] == [whole]
    assert not (tmp_path / f"{whole}.tmp").exists() and not (tmp_path / ("file-" + "0" * 24)).exists()
    assert "left out" in caplog.text


def test_a_draft_is_nothing_before_it_is_published(tmp_path):
    store = FileStore(tmp_path)
    with pytest.raises(ZeroDivisionError), store.draft("", "batch") as draft:
        draft.write(DATA)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with store.draft("", "batch") as draft:
        draft.write(DATA)
        assert store.of("") == []
        made = draft.publish()
    assert store.get(made.id, "") == made
    with pytest.raises(ApiError):
        store.get(made.id, "another")


def test_a_folder_is_one_servers(tmp_path):
    folder = DataFolder(tmp_path / "data")
    with pytest.raises(UserError, match=f"another server uses .process {os.getpid()} on "):
        DataFolder(tmp_path / "data")
    folder.close()
    DataFolder(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o77 == 0
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--data-dir .*: expected a folder that can be written"):
        DataFolder(tmp_path / "file/data")


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    client = client_of(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcdecode.serve.files.store.publish", full)
    answer = upload(client)
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "disk_full"
    assert client.get("/v1/files").json()["data"] == []
