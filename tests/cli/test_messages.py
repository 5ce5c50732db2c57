"""How much a command says on standard error: by default, under -q and under -v."""

from __future__ import annotations

import logging

import pytest

from hpcdecode.cli import log
from hpcdecode.ranks import launch
from hpcdecode.report.progress import Progress

ROWS = '{"prompt": "The with"}\n{"prompt": "A", "temprature": 1}\n'


@pytest.fixture
def generated(hpcdecode, tmp_path):
    (tmp_path / "p.jsonl").write_text(ROWS)

    def run(*flags):
        result = hpcdecode("generate", "--model", "demo", "--max-tokens", 2, "p.jsonl", "--overwrite", *flags)
        assert result.returncode == 0 and not result.stdout, result.stderr
        return result.stderr

    return run


def test_experts_on_one_rank_cannot_be_dealt_out(hpcdecode, checkpoint, tmp_path):
    (tmp_path / "p.jsonl").write_text(ROWS)
    result = hpcdecode("generate", "--model", checkpoint("mixtral"), "--max-tokens", 2, "p.jsonl", "--ep", "-q")
    assert result.returncode == 0 and "--ep has no effect: the experts are on one rank" in result.stderr


def test_by_default_a_job_says_what_it_chose_and_did(generated):
    said = generated()
    assert "did you mean 'temperature'?" in said and "batch 2," in said and "ready after" in said
    assert "tokens/s" in said and "level load" not in said


def test_quiet_leaves_warnings(generated):
    said = generated("-q")
    assert said.count("\n") == 1 and "did you mean 'temperature'?" in said


def test_quiet_leaves_errors(hpcdecode):
    result = hpcdecode("generate", "--quiet", "none.jsonl", "--model", "demo")
    assert result.returncode == 2 and result.stderr.startswith("hpcdecode: error: ")


def test_verbose_adds_reasons_and_stages(generated):
    said = generated("-v")
    for text in ("hpcdecode: model: ", "2 rows: 2.", "level load", "the checkpoint states", "batch 2,", "tokens/s"):
        assert text in said


def test_one_of_both(hpcdecode):
    result = hpcdecode("generate", "-q", "-v", "none.jsonl")
    assert result.returncode == 2 and "expected to be alone, got -q" in result.stderr


@pytest.fixture
def messages():
    """The command's logging, as far as this test sets it up."""
    root, package = logging.getLogger(), logging.getLogger("hpcdecode")
    handlers, level = list(root.handlers), package.level
    yield package
    root.handlers[:], package.level = handlers, level
    package.setLevel(level)


@pytest.mark.parametrize(("level", "shown"), [(logging.WARNING, False), (logging.INFO, True)])
def test_progress_follows_the_level(messages, monkeypatch, level, shown):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    log.set_up(level)
    progress = Progress(total=3)
    monkeypatch.setattr(progress, "_last", -1e9)
    assert progress.due() == shown
    progress.close(3)


def test_setting_up_twice_prints_once(messages, capsys):
    log.set_up()
    log.set_up(logging.DEBUG)
    messages.debug("hpcdecode: once")
    assert capsys.readouterr().err == "hpcdecode: once\n"


def test_last_words_are_printed_without_any_logging(messages, capsys):
    logging.getLogger().handlers.clear()
    launch.last_words("hpcdecode: rank 0 failed")
    assert capsys.readouterr().err == "hpcdecode: rank 0 failed\n"
