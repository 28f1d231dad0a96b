"""Equality in bits and in ulps, digests, and records that are whole or absent."""

import hashlib
import json
import math
import os
import struct

import pytest
import torch
from hypothesis import given

from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.records import records
from tests.json_values import damaged

NAN, INF = math.nan, math.inf
SOUND = {
    "schema_version": 1, "created": "2026-11-30T01:02:03+00:00", "command": "dcp-fix verify", "commit": "ab" * 20,
    "dirty": False, "hardware": {"cpu": "x", "cores": 2, "gpus": ["y"], "driver": "1"}, "results": {"rows": [1]},
    "versions": {"python": "3", "torch": "2", "triton": None, "cuda": None},
}  # fmt: skip
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


def test_digest_is_sha256_of_the_raw_bytes():
    assert equality.digest(b"lock") == hashlib.sha256(b"lock").hexdigest()
    assert equality.digest([1, -2, 2**40]) == hashlib.sha256(struct.pack("<3q", 1, -2, 2**40)).hexdigest()
    assert equality.digest(torch.tensor([1.5, -0.0])) == hashlib.sha256(struct.pack("<2f", 1.5, -0.0)).hexdigest()


def test_digest_of_a_view_is_that_of_its_copy():
    padded = torch.randn(3, 7)[:, :5]
    assert equality.digest(padded) == equality.digest(padded.clone())
    assert equality.digest(padded.t()) != equality.digest(padded)
    assert equality.digest(torch.empty(0)) == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("dtype", FLOATS)
def test_digest_takes_every_dtype_in_use(dtype):
    x = torch.tensor([[1.0, -2.0, 0.5]]).to(dtype)
    assert len(equality.raw_bytes(x)) == 3 * x.element_size()


def test_same_bytes_sees_every_bit():
    a = torch.tensor([0.0, NAN, INF])
    assert equality.same_bytes(a, a.clone())
    assert not equality.same_bytes(a, torch.tensor([-0.0, NAN, INF])), "0.0 and -0.0 are equal, not identical"
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not equality.same_bytes(torch.tensor([NAN]), other_nan)


def test_same_bytes_needs_one_dtype_and_shape():
    zeros = torch.zeros(2, 3)
    assert not equality.same_bytes(zeros, torch.zeros(3, 2))
    assert not equality.same_bytes(zeros, torch.zeros(2, 3, dtype=torch.int32))
    assert equality.same_bytes([1, 2], [1, 2]) and not equality.same_bytes([1, 2], [1, 2, 0])
    with pytest.raises(ValueError, match="two of a kind"):
        equality.same_bytes([0.0], zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_neighbours_are_one_ulp_apart(dtype):
    x = torch.tensor([1.0, 1.5, 3.0, 0.375, 640.0], dtype=torch.float64)
    power_of_two = torch.tensor([1.0, 1.0, 2.0, 0.25, 512.0], dtype=torch.float64)
    neighbour = (x + power_of_two * torch.finfo(dtype).eps).to(dtype)
    assert equality.ulps_apart(x.to(dtype), neighbour) == 1.0
    assert equality.close(x.to(dtype), neighbour, ulps=1) and not equality.close(x.to(dtype), neighbour, ulps=0.9)


def test_every_step_of_a_wide_range_is_one_ulp():
    bits = torch.cat([torch.arange(0, 200), torch.arange(0x00800000, 0x7F7FFFFF, 9_999_991)]).int()
    a, b = bits.view(torch.float32), (bits + 1).view(torch.float32)
    steps = [equality.ulps_apart(x, y) for x, y in zip(a.split(1), b.split(1), strict=True)]
    assert set(steps) == {1.0}


def test_the_unit_is_that_of_the_larger_and_halves_below_a_power_of_two():
    below = torch.nextafter(torch.tensor([1.0]), torch.tensor([0.0]))
    assert equality.ulps_apart(torch.tensor([1.0]), below) == 0.5
    assert equality.ulps_apart(below, torch.tensor([1.0])) == 0.5


def test_subnormals_have_the_smallest_unit():
    tiny = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    assert equality.ulps_apart(torch.tensor([0.0]), torch.tensor([3 * tiny])) == 3.0


@pytest.mark.parametrize("a, b", [(NAN, NAN), (NAN, 1.0), (INF, 1.0), (INF, -INF), (3.4028235e38, INF)])
def test_nothing_is_close_to_nan_or_to_a_lone_infinity(a, b):
    assert equality.ulps_apart(torch.tensor([1.0, a]), torch.tensor([1.0, b])) == INF
    assert not equality.close(torch.tensor([1.0, a]), torch.tensor([1.0, b]), ulps=1e9)


def test_equal_infinities_and_empty_tensors_are_close():
    assert equality.ulps_apart(torch.tensor([-INF, 2.0]), torch.tensor([-INF, 2.0])) == 0.0
    assert equality.close(torch.empty(0), torch.empty(0), ulps=0)


def test_a_floor_measures_small_elements_in_the_unit_of_the_summands():
    a, b = torch.tensor([[1e-9, 8.0], [1.0, 2.0]]), torch.tensor([[2e-9, 8.0], [1.0, 2.0]])
    assert not equality.close(a, b, ulps=4)
    assert equality.close(a, b, ulps=4, floor=8.0)
    assert equality.close(a, b, ulps=4, floor=b.abs().amax(dim=1, keepdim=True))


def test_ulps_need_one_floating_dtype_and_shape():
    with pytest.raises(ValueError, match=r"torch.float32 \(2,\) and torch.bfloat16 \(2,\)"):
        equality.ulps_apart(torch.zeros(2), torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        equality.close(torch.zeros(2, 1), torch.zeros(1, 2), ulps=1)
    with pytest.raises(ValueError, match="int64"):
        equality.ulps_apart(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    "a, b, index",
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 6], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [7], 0),
        ([], [], None),
        (b"abc", b"abd", 2),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), 1),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None),
        (torch.empty(0, 3), torch.empty(0, 3), None),
    ],
)
def test_first_difference(a, b, index):
    assert equality.first_difference(a, b) == index


def test_first_difference_of_a_view_is_an_index_into_it():
    a = torch.arange(30.0).view(2, 5, 3).transpose(0, 1)
    b = a.clone()
    b[3, 1, 2] = NAN
    assert equality.first_difference(a, b) == (3, 1, 2)
    with pytest.raises(ValueError, match=r"\(5, 2, 3\)"):
        equality.first_difference(a, torch.zeros(5, 3, 2))


def test_a_record_reads_back_as_written(tmp_path):
    path = tmp_path / "run.json"
    written = records.record(path, "dcp-fix reproduce --prompts 2", {"rows": [{"rung": "unpatched", "equal": 0}]})
    assert records.load_record(path) == written
    assert written["command"] == "dcp-fix reproduce --prompts 2"
    assert written["hardware"]["cpu"] and written["hardware"]["cores"] >= 1
    assert len(written["hardware"]["gpus"]) == torch.cuda.device_count()
    assert written["versions"]["torch"] == torch.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("value", [NAN, INF, object()])
def test_a_record_that_cannot_be_json_leaves_the_old_one(tmp_path, value):
    path = tmp_path / "run.json"
    records.record(path, "first", {"n": 1})
    with pytest.raises((ValueError, TypeError)):
        records.record(path, "second", {"n": value})
    assert records.load_record(path)["command"] == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    records.write_json(path, [1])

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        records.write_json(path, [2])
    assert json.loads(path.read_text()) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_results_are_an_object_or_a_list(tmp_path):
    with pytest.raises(UserError, match='results is "fine"; allowed: an object or a list'):
        records.record(tmp_path / "run.json", "command", "fine")
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_record_is_no_record(tmp_path):
    path = tmp_path / "run.json"
    records.record(path, "command", {"n": 1})
    whole = path.read_text()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_text(whole[:length])
        with pytest.raises(UserError, match="run.json: not a whole JSON file"):
            records.load_record(path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda r: r.pop("commit"), "lacks commit; allowed: a commit of 40"),
        (lambda r: r.pop("results"), "lacks results; allowed: an object or a list, not empty"),
        (lambda r: r.update(results={}), "results is {}; allowed: an object or a list, not empty"),
        (lambda r: r.update(results=[]), r"results is \[\]; allowed: an object or a list, not empty"),
        (lambda r: r["hardware"].pop("driver"), "lacks hardware.driver"),
        (lambda r: r["hardware"].update(gpus=[1]), "hardware.gpus.0 is 1; allowed: a list of names"),
        (lambda r: r["hardware"].update(cores=0), "hardware.cores is 0; allowed: a number of cores"),
        (lambda r: r["versions"].update(torch=None), "versions.torch is null; allowed: a version"),
        (lambda r: r.update(hardware=[]), r"hardware is \[\]; allowed: an object"),
        (lambda r: r.update(schema_version=2), "schema_version is 2; allowed: 1"),
        (lambda r: r.update(schema_version=True), "schema_version is true; allowed: 1"),
        (lambda r: r.update(commit="0" * 39), "commit is .*; allowed: a commit of 40 hexadecimal digits"),
        (lambda r: r.update(dirty="no"), 'dirty is "no"; allowed: true, false or null'),
        (lambda r: r.update(created="yesterday"), 'created is "yesterday"; allowed: a time such as'),
        (lambda r: r.update(signed_by="me"), "signed_by is not known here"),
    ],
)
def test_a_record_with_a_wrong_field_is_refused_by_name(tmp_path, damage, message):
    path = tmp_path / "run.json"
    changed = records.record(path, "command", {"n": 1})
    damage(changed)
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=message):
        records.load_record(path)


def test_a_file_that_is_absent_or_no_object_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such record"):
        records.load_record(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UserError, match=r"the file is \[1\]; allowed: an object"):
        records.load_record(tmp_path / "list.json")


@given(damaged(SOUND))
def test_any_record_is_read_as_it_is_or_refused_by_name(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any_record.json"
    path.write_text(json.dumps(value))
    try:
        assert records.load_record(path) == value
    except UserError as error:
        lines = str(error).split("\n")
        assert all("any_record.json: " in line and line.isprintable() and len(line) < 600 for line in lines), lines
    else:
        assert value["schema_version"] == 1 and value["results"] and isinstance(value["hardware"]["gpus"], list)
