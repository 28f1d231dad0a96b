"""The forced pass: every planted defect is caught and its sublayer named, and healthy runs of every kind pass.

Every test here runs the small cases that `dcp-fix verify` runs unasked, at TP4/DCP4 where nothing else is said.
"""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

from dcp_fix import broken, cli, combine, planted
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import LocalGroup
from dcp_fix.records.records import load_record
from dcp_fix.tiny import corpus
from dcp_fix.verify import all_planted, forced, steps, verify
from dcp_fix.verify import report as verify_report
from dcp_fix.verify.sublayers import LONG

pytestmark = pytest.mark.timeout(600)
SMALL = {case.name: case for case in forced.small_cases()}
SETTINGS = verify.Settings(dcp=(1, 4))


@pytest.fixture(scope="module")
def model():
    return Model.load(corpus.CHECKPOINT, "cpu")


@pytest.fixture(scope="module")
def caught(model):
    """Every planted defect by its name: what was found."""
    found = LocalGroup.run(4, lambda group: all_planted.caught(group, SETTINGS, model, None))[0]
    return {each.name: each for each in found}


def run(model, case, size, ops=None, tp=4, combine="ag_rs"):
    """One case at one DCP size, as rank 0 has it."""
    return LocalGroup.run(tp, lambda group: forced.Forced(group, model, combine).rows(case, (size,), ops))[0][0]


# --- planted defects --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", planted.PLANTS)
def test_a_planted_defect_is_caught_and_its_sublayer_named(caught, name):
    found = caught[name]
    assert found.ok, found.row.first
    report = verify.Report(SETTINGS, "threads", ["x"], [], [], (found.row,))
    assert not report.ok and planted.PLANTS[name].shows in verify_report.verdict(report)


@pytest.mark.parametrize("name, plant", planted.PLANTS.items())
def test_a_planted_defect_has_the_signature_of_what_it_stands_in_for(name, plant):
    stands_in_for = getattr(Ops(), plant.step)
    assert list(inspect.signature(plant.function).parameters) == list(inspect.signature(stands_in_for).parameters)
    assert plant.function.__doc__ and plant.who.endswith(".") and plant.shows in steps.STEPS and plant.case in SMALL


@pytest.mark.parametrize(
    "ops, case, shows",
    [
        (Ops(norm_rope=broken.norm_rope_skip_all_rows), "sparse", "query norm"),
        (Ops(route=broken.attend_unrouted), "sparse", "heads"),
        (Ops(norm_rope=broken.norm_rope_skip_dense_rows), "prefix", "new rows"),
    ],
)
def test_the_historical_defects_are_named_too(model, ops, case, shows):
    assert run(model, SMALL[case], 4, ops).first["step"] == shows


def test_the_first_finding_is_the_earliest_of_all_ranks(model):
    """Only rank 2 combines wrongly, and only from layer 1 on: layer 1 and rank 2 are named."""

    def late(q, partial, manager, decode_only=False):
        late.calls[manager.group.rank] += 1
        out = combine.attend_routed(q, partial, manager, decode_only)
        return out * 1.001 if manager.group.rank == 2 and late.calls[2] > 1 else out

    late.calls = [0] * 4
    row = run(model, SMALL["ties"], 4, Ops(route=late))
    assert (row.first["batch"], row.first["layer"], row.first["rank"], row.first["step"]) == (0, 1, 2, "combine")
    assert row.largest["mlp"] == 0 and row.largest["query norm"] == 0  # differences do not pile up


# --- healthy runs -----------------------------------------------------------------------------------------------------


def test_healthy_runs_pass_with_room_to_spare(model):
    """Every small case and two classes, both routes, all cache formats: a quarter of each bound at most."""
    settings = replace(SETTINGS, classes=("512",))
    found = LocalGroup.run(4, lambda group: all_planted.healthy(group, settings, model, None))[0]
    assert {row.cache_format for _, row in found} == {"fp8_ds_mla", "fp8", "bf16"}
    assert {combine for combine, _ in found} == {"ag_rs", "a2a"}
    for _, row in found:
        assert row.ok, row.first
        over = {step: row.largest.get(step, 0.0) for step, bound in steps.BOUNDS[torch.float32].items()}
        assert all(size <= steps.BOUNDS[torch.float32][step] / 3 for step, size in over.items()), over


@pytest.mark.parametrize("case", SMALL)
def test_healthy_runs_pass_on_eight_ranks(model, case):
    assert run(model, SMALL[case], 8, tp=8).first is None


@pytest.mark.parametrize("case", ["sparse", "prefix"])
def test_healthy_runs_pass_in_bf16(case):
    assert run(Model.load(corpus.CHECKPOINT, "cpu", torch.bfloat16), SMALL[case], 4).first is None


def test_exact_mode_has_equal_bits_after_the_combine(model):
    row = run(model, SMALL["sparse"], 4, combine="exact")
    assert row.ok and row.largest["attention"] == 0


def test_a_sparse_prefill_beyond_one_piece_passes(model):
    case = replace(forced.class_case("1536"), prompt=forced.class_case("1536").prompt[: LONG + 64])
    row = run(model, case, 2, tp=2)
    assert row.ok and row.pieces[0] < row.pieces[1] and row.batches == 1 + forced.STEPS_DECODED


# --- the command ------------------------------------------------------------------------------------------------------


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "verify", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, capsys.readouterr().out


def test_a_planted_run_fails_though_its_tokens_are_equal(monkeypatch, capsys, tmp_path):
    record = tmp_path / "r.json"
    arguments = ["--classes", "512", "--tp", "2", "--dcp", "1,2", "--plant", "lse-base", "--record", str(record)]
    status, said = command(monkeypatch, capsys, *arguments)
    results = load_record(record)["results"]
    assert status == launch.DIFFERS and "combine, layer 0" in said and "planted: lse-base" in said
    assert all(row["same"] for row in results["rows"]) and not results["ok"] and results["settings"]["plant"]


def test_the_list_names_every_planted_defect(monkeypatch, capsys):
    status, said = command(monkeypatch, capsys, "--plant", "list")
    assert status == 0 and len(planted.PLANTS) == 14
    assert all(name in said and plant.who in said for name, plant in planted.PLANTS.items())


def test_all_planted_is_recorded(monkeypatch, capsys, tmp_path):
    few = {name: planted.PLANTS[name] for name in ("short-length", "no-interleave")}
    monkeypatch.setattr(planted, "PLANTS", few)
    monkeypatch.setattr(forced, "small_cases", lambda: [SMALL["ties"]])
    arguments = [
        "--plant",
        "all",
        "--classes",
        "512",
        "--tp",
        "2",
        "--dcp",
        "1,2",
        "--record",
        str(tmp_path / "r.json"),
    ]
    status, said = command(monkeypatch, capsys, *arguments)
    assert status == 0 and "2 of 2 planted defects are caught and named." in said
    results = load_record(tmp_path / "r.json")["results"]
    assert results["ok"] and [each["name"] for each in results["planted"]] == list(few)
    monkeypatch.setattr(all_planted, "healthy", lambda *asked: [])
    monkeypatch.setattr(planted, "PLANTS", {"harmless": replace(few["no-interleave"], function=Ops().localise)})
    assert command(monkeypatch, capsys, *arguments)[0] == launch.DIFFERS  # a defect that is not caught


# --- comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, rows",
    [
        (torch.zeros(3, 2), torch.zeros(3, 2), 0),
        (torch.tensor([[0.0], [1.0]]), torch.tensor([[-0.0], [1.0]]), 1),
        (torch.full((2, 2), torch.nan), torch.full((2, 2), torch.nan), 0),
        (torch.zeros(3, 2), torch.zeros(2, 2), 3),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16), 2),
        (torch.zeros(0, 2), torch.zeros(0, 2), 0),
    ],
)
def test_rows_differ_when_a_bit_does(a, b, rows):
    assert steps.differing_rows(a, b) == rows


def test_partials_merge_in_fp64():
    outs, lses = torch.tensor([[[[3.0]]], [[[torch.nan]]]]), torch.tensor([[[2.0]], [[-torch.inf]]])
    merged, floor = steps.merge(outs.double(), lses.double())
    assert merged.tolist() == [[[3.0]]] and floor.tolist() == [[[3.0]]]
    nothing, _ = steps.merge(outs.double(), torch.full_like(lses, -torch.inf).double())
    assert nothing.tolist() == [[[0.0]]]
