"""`--partition head` on the demo model, which has three KV heads."""

from __future__ import annotations

from tests.mpi.test_worlds import FLAGS, PROMPTS, contents


def test_heads_that_r_ranks_cannot_share_out_are_refused(hpcdecode):
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--partition", "head", ranks=3)
    assert result.returncode == 2, result.stderr
    assert "--partition head: expected a number of R-ranks that divides" in result.stderr and "got 2" in result.stderr


def test_by_head_an_r_rank_holds_every_sequence_in_a_share_of_the_bytes(hpcdecode, tmp_path):
    found = {}
    for kind in ("request", "head"):
        flags = (*FLAGS, "--partition", kind, "--overlap", 2, "--kv-memory", "16M")
        result = hpcdecode("generate", PROMPTS, "-o", f"{kind}.h5", *flags, ranks=4)
        assert result.returncode == 0, result.stderr
        found[kind] = contents(tmp_path / f"{kind}.h5")
    assert found["head"][0] == found["request"][0]
    by_request, by_head = ([r["kv_tokens"] for r in found[kind][1][1:]] for kind in ("request", "head"))
    assert all(3 * whole <= own < 3 * (whole + 64) for whole, own in zip(by_request, by_head, strict=True))
