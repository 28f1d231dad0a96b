"""exact_cost.py on a CPU: what is measured is what the engine does, the bytes are counted, the record is whole."""

import sys

import pytest
import torch

from dcp_fix import cli
from dcp_fix.base.equality import close
from dcp_fix.bench import exact_cost
from dcp_fix.bench.exact_cost import Size, measure
from dcp_fix.combine import combine_a2a, combine_ag_rs
from dcp_fix.records.records import load_record

CPU = torch.device("cpu")
SMALL = {"tokens": 3, "context": 200, "heads": 4, "topk": 40, "dcp": 4}
HEADS = 16  # of the group


def test_exact_and_ordinary_compute_the_same_attention():
    q, cache, ids, offset = exact_cost.inputs(Size(**SMALL, method="a2a"), CPU)
    gathered = torch.cat([q] * 4, 1)
    want = exact_cost.ordinary_partial(Size(**SMALL, method="a2a"), cache, ids, offset)(gathered)
    for classes in (4, 8):
        size = Size(**SMALL, method="exact", classes=classes)
        got = exact_cost.exact_partial(size, cache, ids, offset, exact_cost.leaf_table(size, CPU))(gathered)
        assert close(got[0], want[0], ulps=16, floor=1.0) and close(got[1], want[1], ulps=8)


def test_every_request_has_a_cache_of_its_own_and_a_quarter_of_its_keys():
    size = Size(**SMALL, method="a2a")
    _, cache, ids, offset = exact_cost.inputs(size, CPU)
    slots = exact_cost.own_slots(size, ids, offset)
    assert len(cache) == 3 and (slots // 64 == torch.arange(3)[:, None])[slots >= 0].all()
    assert torch.equal(slots >= 0, ids % 4 == 0) and (ids.diff() > 0).all()


def test_bytes_are_those_of_the_collectives():
    """Query gather, then outputs and lse: exact sends what a2a sends, whatever C is."""
    query, out, lse = 3 * 4 * 576 * 4 * 3, 3 * HEADS * 512 * 4 * 3 // 4, 3 * HEADS * 4
    sent = {
        (method, classes): measure(Size(**SMALL, method=method, classes=classes), CPU).bytes
        for method, classes in exact_cost.methods(4)
    }
    assert sent["a2a", 0] == sent["exact", 4] == sent["exact", 8] == query + out + lse * 3 // 4
    assert sent["ag_rs", 0] == query + out + lse * 3


def test_the_mirror_is_a_group_whose_peers_say_the_same():
    group, out, lse = exact_cost.Mirror(4), torch.randn(3, 8, 512), torch.randn(3, 8)
    for combine in (combine_ag_rs, combine_a2a):
        assert close(combine(out, lse, group), out[:, :2], ulps=2, floor=1.0)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(exact_cost, "REPEATS", 2)
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "bench", "exact", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def test_the_command_prints_a_table_and_writes_a_record(monkeypatch, tmp_path, capsys):
    """Into a pipe: no number is cut, however narrow the terminal behind it says it is."""
    path = tmp_path / "bench.json"
    monkeypatch.setenv("COLUMNS", "60")
    options = "--tokens 1,2 --contexts 128 --dcp 1,4 --topk 32 --record"
    assert run(monkeypatch, *options.split(), str(path)) == 0
    out = capsys.readouterr().out
    assert "exact" in out and "…" not in out
    rows = load_record(path)["results"]["rows"]
    asked = [(row["dcp"], row["tokens"], row["method"], row["classes"]) for row in rows]
    assert asked == [(d, t, m, c) for d in (1, 4) for t in (1, 2) for m, c in exact_cost.methods(d)]
    assert all(row["attend_ms"] > 0 and row["step_ms"] > 0 and row["heads"] == 16 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--dcp 3", "DCP size of 3 does not divide the TP size 4"), ("--tp 3 --dcp 3", "TP size of 3 does not divide 64"),
     ("--tokens 0", "must be at least 1"), ("--tp 16 --dcp 16", "does not divide the 8 canonical classes")],
)  # fmt: skip
def test_sizes_that_cannot_be_measured_are_refused(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments.split()) == 2
    assert message in capsys.readouterr().err
