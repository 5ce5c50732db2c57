"""Which layout a profile chooses for a job, without starting one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hpcdecode.config import Job
from hpcdecode.errors import UserError
from hpcdecode.planning.auto import _advice
from hpcdecode.ranks.layout import assign_roles
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.system.model_path import find_model
from tests.support.profiles import old_profile, profile, with_sums, write

GIB = 1 << 30
NOTHING = Wishes()


@pytest.fixture
def advised(tmp_path):
    """Return a function: the profile's wishes and words for ranks of one host."""
    rows = [{"prompt_token_ids": [5] * 20, "max_tokens": 17}] * 300
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def advice(found, wishes=NOTHING, gpus=0, weights=1 << 20, count=4, prompts="rows.jsonl", **flags):
        ranks = [Rank(rank=i, host="a", cpus=[i], memory=GIB, weights=weights) for i in range(count)]
        for i in range(gpus):
            ranks[i].gpus = [str(i)]
        team = Team(SimpleNamespace(rank=0), ranks, assign_roles(ranks, wishes))
        source = prompts if prompts == "-" else str(tmp_path / prompts)
        path = write(tmp_path / "profile.json", found)
        job = Job(model=find_model("demo", {}), prompts=(source,), output="out.h5", profile=path, **flags)
        return _advice(job, wishes, team)

    return advice


def test_the_fastest_layout_is_asked_for(advised):
    wishes, said = advised(profile(4))
    assert wishes.layout == "replicas" and wishes.s_ranks is None
    assert said.startswith(": ") and " tokens/s predicted\n  " in said and " S + " in said
    wishes, said = advised(profile(4, slower_replicas=100))
    assert wishes.layout == "split" and wishes.s_ranks is not None and "  4 replicas: 0.0" in said


def test_what_is_asked_for_is_kept(advised):
    slow = profile(4, slower_replicas=100)
    assert advised(slow, Wishes(layout="replicas")) == (Wishes(layout="replicas"), "")
    assert advised(slow, Wishes(s_ranks=3)) == (Wishes(s_ranks=3), "")
    wishes, said = advised(profile(4), Wishes(layout="split", pools="own"))
    assert wishes.layout == "split" and wishes.pools == "own" and "replicas" not in said
    assert advised(profile(1), count=1) == (Wishes(), "")


def test_weights_that_do_not_fit_on_every_rank_leave_splits(advised):
    wishes, said = advised(profile(4), weights=GIB // 4)
    assert wishes.layout == "split" and wishes.s_ranks and "replicas" not in said


def test_weights_that_fit_on_groups_are_shared(advised):
    """Two copies fit beside each other, four do not."""
    wishes, said = advised(with_sums(profile(4), 1e-6, 2), weights=GIB // 4)
    assert (wishes.layout, wishes.tp, wishes.s_ranks) == ("replicas", 2, None) and " tokens/s predicted" in said
    wishes, said = advised(with_sums(profile(4), 1.0, 2), weights=GIB // 4)
    assert wishes.layout == "split" and wishes.s_ranks and wishes.tp is None and " of 2 ranks: 0.0" in said


def test_groups_must_win_by_a_tenth(advised):
    """A job of four rows: reading the weights is all that counts, and two ranks read half of them each."""
    few = {"limit": 4}
    assert [advised(with_sums(profile(4), 1e-6, *most), **few)[0].tp for most in ((2,), (2, 4))] == [2, 4]
    wishes, said = advised(with_sums(profile(4), 1e-3, 2), **few)
    assert wishes == Wishes(layout="replicas") and "2 replicas of 2 ranks" in said


def test_groups_that_are_asked_for_are_kept(advised):
    found = with_sums(profile(4), 1e-6, 2, 4)
    wishes, said = advised(found, Wishes(tp=2, layout="split"))
    assert (wishes.tp, wishes.layout, wishes.s_ranks) == (2, "split", 2) and "replicas" not in said
    assert advised(found, Wishes(tp=4))[0] == Wishes(tp=4, layout="replicas")
    assert advised(found, Wishes(pp=2)) == (Wishes(pp=2), "")
    assert advised(profile(4), Wishes(tp=2)) == (Wishes(tp=2), "")


def test_a_profile_does_not_speak_of_gpus(advised):
    for gpus in (2, 4):
        with pytest.raises(UserError, match="was measured on CPUs, as all profiles are"):
            advised(profile(4), gpus=gpus)
    assert advised(profile(4), gpus=4, device="cpu", r_device="cpu")[0].layout == "replicas"


def test_an_old_profile_speaks_of_a_split_alone(advised):
    assert advised(old_profile(4), Wishes(layout="split")) == (Wishes(layout="split"), "")


def test_a_pipe_is_not_read_twice(advised):
    wishes, said = advised(profile(4), prompts="-")
    assert wishes == Wishes() and "by the rule, as prompts from standard input" in said


def test_tight_memory_is_no_error(advised):
    wishes, said = advised(profile(4), kv_memory=1 << 16)
    assert wishes == Wishes() and "KV memory is too small" in said


def test_few_rows_are_counted(advised):
    """300 rows of 4 ranks: the number is known, so that groups have no more of them."""
    few, many = (advised(profile(4), limit=limit)[1] for limit in (8, None))
    speeds = [float(said.split()[1].replace(",", "")) for said in (few, many)]
    assert speeds[0] < 0.5 * speeds[1]


def test_what_rows_share_is_prefilled_once(advised, tmp_path):
    documents = [[token] * 400 for token in (5, 6)]
    rows = [{"prompt_token_ids": [*documents[i % 2], 9 + i], "max_tokens": 17} for i in range(200)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = (advised(profile(4), prompts="asked.jsonl", prefix_sharing=shares)[1] for shares in (True, False))
    shared, apart = (float(text.split()[1].replace(",", "")) for text in said)
    assert shared > 1.5 * apart


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (profile(3), "was measured with 3 ranks; this job has 4 ranks: calibrate as it will run"),
        (old_profile(4), "has no costs of replicas, so it cannot say whether a split is faster: calibrate again"),
    ],
)
def test_a_profile_that_cannot_tell_is_refused(advised, found, said):
    with pytest.raises(UserError, match=said):
        advised(found)
