"""Rows of a simulated job: what they share with the rows before them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpcdecode.cli import main
from hpcdecode.planning import lengths
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.system.model_path import find_model


def test_rows_of_a_part_share_what_all_rows_between_them_share():
    rows = lengths.of([50] * 6, [8] * 6, [0, 40, 30, 20, 40, 10])
    assert rows.part(1, 2).shared[1:].tolist() == [20, 10]
    assert rows.part(0, 2).shared[1:].tolist() == [30, 20]
    assert rows.head(3).shared.tolist() == [0, 40, 30] and rows.mean_shared == pytest.approx(140 / 6)
    assert lengths.of([50], [8]).part(0, 2).shared is None


def test_a_feed_makes_rows_that_begin_alike():
    rows = lengths.of([50, 60, 45], [8] * 3, [0, 40, 45])
    feed = SimulatedFeed(rows)
    one, two, three = (feed.pop().token_ids for _ in range(3))
    assert one[:40] == two[:40] and one[40] != two[40] and (len(one), len(two), len(three)) == (50, 60, 45)
    assert two[:45] == three


def test_rows_behind_a_prefix_share_it():
    rows = lengths.behind(100, lengths.fixed(3, 20, 8))
    assert rows.prompt.tolist() == [120] * 3 and rows.shared.tolist() == [0, 100, 100]
    assert lengths.behind(100, rows).shared.tolist() == [0, 200, 200]
    apart = lengths.behind(100, lengths.fixed(3, 20, 8), shared=False)
    assert apart.prompt.tolist() == [120] * 3 and apart.shared is None
    assert lengths.poisson(rows, 9.0, 1).shared is rows.shared


def test_rows_of_a_file_are_in_the_order_of_a_job(tmp_path):
    documents = [f"{word} " * 400 for word in ("import", "while")]
    texts = [documents[i % 2] + f"question {i}" for i in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    model = find_model("demo", {})
    rows, apart = (lengths.of_file(str(path), model, 8, shares) for shares in (True, False))
    assert apart.shared is None and sorted(rows.prompt) == sorted(apart.prompt)
    assert (rows.shared > 300).tolist() == [False, True, True, False, True, True]
    assert np.all(rows.shared < rows.prompt)


def test_what_all_rows_begin_with_is_prefilled_once_by_simulations_and_plans(capsys):
    def said(command, *flags):
        rows = ("--fixed", "64", "64", "--rows", "400", "--prefix-len", "1000", "--max-tokens", "64")
        devices = ("--s-device", "a10", "--r-device", "epyc-7003", "--r-ranks", "2")
        assert main([command, "--model", "demo", *rows, *devices, *flags]) == 0
        return capsys.readouterr().out

    seconds = [json.loads(said("simulate", "--json", *flags))["seconds"] for flags in ((), ("--no-prefix-sharing",))]
    assert seconds[0] < 0.7 * seconds[1]
    assert "less 998 of p that are shared" in said("plan")
    assert "shared" not in said("plan", "--no-prefix-sharing")
    assert main(["simulate", "--model", "demo", "--prefix-len", "-1"]) == 2
