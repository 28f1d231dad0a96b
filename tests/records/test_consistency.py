"""What a record says against itself: each forgery of a sound record is told, and by the number that is false."""

import copy
import subprocess
from pathlib import Path

import pytest
import torch

from dcp_fix.base import equality
from dcp_fix.learn import recorded_runs
from dcp_fix.verify import forced, steps
from tests.records.consistency import contradictions


def small_verification():
    """What `verify --passes forced` writes, as far as it is checked: no committed record has a forced pass."""
    cases = ["512", *(case.name for case in forced.small_cases())]
    rows = [{"case": name, "dcp": 2, "ok": True, "first": None, "largest": {"lse": 1.0}} for name in cases]
    settings = {"dcp": [1, 2], "classes": ["512"], "prompts": 1, "passes": ["forced"], "device": "cpu", "logits": False}
    told = {"transport": "threads", "dtype": "float32", "rows": [], "forced": rows, "odd_ranks": [], "ok": True}
    return told | {"settings": settings, "bounds": steps.BOUNDS[torch.float32], "verdict": "makes the same of it"}


ROOT = Path(__file__).resolve().parents[2]
RECORDS = recorded_runs.load_all(ROOT / "notebooks/records")
VERIFY, LADDER, HOST, BENCH = (RECORDS[n] for n in ("h200_verify_graphs", "h200_ladder", "h200x2_host", "h200_bench"))
REAL, PLANTED, KERNELS = (RECORDS[n] for n in ("h200x2_vllm0290", "h200_planted", "h200_kernels_bench"))
PACK, SMALL = RECORDS["h200x2_pack0300"], {**VERIFY, "results": small_verification()}


@pytest.mark.parametrize("name", [*RECORDS, "forced"])
def test_a_sound_record_says_nothing_against_itself(name):
    assert contradictions(RECORDS.get(name, SMALL)) == []


@pytest.mark.parametrize("name", RECORDS)
def test_the_commit_of_a_record_is_in_the_history(name):
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("no whole git checkout")
    commit = RECORDS[name]["commit"]
    known = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True)
    assert known.returncode == 0, f"{commit} is no ancestor of this checkout"


def rows(record):
    return record["results"]["rows"]


def every(record, name, value):
    """Put the same false value into every row."""
    for row in rows(record):
        row[name] = value


def rewrite_tokens(row, tokens):
    """Other tokens, with the digest that they have."""
    row["tokens"], row["sha256"] = tokens, equality.digest(tokens)


def answer(record, rung="+workspace"):
    return next(row for row in rows(record) if row["rung"] == rung)["answers"][0]


def real(record, rung="as installed"):
    """The first answer of a rung that is wrong in it."""
    answers = [answer for row in rows(record) if row["rung"] == rung for answer in row["answers"]]
    return next(answer for answer in answers if answer["first_difference"] is not None)


def boot(record):
    return record["results"]["boots"]["as installed"]


def drop(record, rung):
    record["results"]["rows"] = [row for row in rows(record) if row["rung"] != rung]


def planted(record):
    return record["results"]["planted"][0]


FORGED = {
    "real vLLM: a false digest in every row": (
        REAL, lambda r: [a.update(sha256="0" * 64) for row in rows(r) for a in row["answers"]], "sha256 0000",
    ),
    "real vLLM: a wrong answer called right": (REAL, lambda r: real(r).update(right=True), "right True, and it is F"),
    "real vLLM: another text": (REAL, lambda r: real(r).update(text="the oak key"), "text the oak key"),
    "real vLLM: false equality": (REAL, lambda r: real(r).update(first_difference=None), "first_difference None"),
    "real vLLM: a false share": (REAL, lambda r: real(r).update(commonest_share=0.01), "commonest_share 0.01"),
    "real vLLM: NaN left out": (REAL, lambda r: real(r).update(nan=-1), "nan -1"),
    "real vLLM: logprobs further apart": (REAL, lambda r: real(r).update(logprob_difference=9.0), "difference 9.0"),
    "real vLLM: a false count": (REAL, lambda r: rows(r)[-1].update(equal=3), "equal 3, and it is 20"),
    "real vLLM: answers left out": (REAL, lambda r: rows(r)[-1]["answers"].pop(), "19 answers and 20 of DCP1"),
    "real vLLM: no reference": (REAL, lambda r: rows(r).pop(0), "0 of DCP1, where 20"),
    "real vLLM: nothing": (REAL, lambda r: r["results"].update(rows=[]), "a ladder without a rung"),
    "real vLLM: not repaired": (REAL, lambda r: r["results"].update(repaired=False), "repaired False, and it is True"),
    "real vLLM: another verdict": (REAL, lambda r: r["results"].update(verdict="fine"), "real vLLM: fine"),
    "a planted defect that is not named": (PLANTED, lambda r: planted(r).update(named=False), "named False"),
    "a planted defect named elsewhere": (PLANTED, lambda r: planted(r).update(shows="mlp"), "shows mlp, and it is"),
    "a planted defect that is fine": (PLANTED, lambda r: planted(r).update(ok=True), "ok True, with selection beyond"),
    "a planted defect within its bound": (
        PLANTED, lambda r: planted(r)["first"].update(step="lse", bound=1), "parts at lse, which is within",
    ),
    "a healthy run beyond its bound": (
        PLANTED, lambda r: r["results"]["healthy"][0]["largest"].update(partial=1e9), "ok True, with partial beyond",
    ),
    "a verdict over all planted": (PLANTED, lambda r: r["results"]["healthy"].pop(), "the verdict of all planted"),
    "nothing planted": (PLANTED, lambda r: r["results"].update(healthy=[], planted=[]), "the verdict of all planted"),
    "a planted defect left out": (
        PLANTED, lambda r: r["results"].update(planted=r["results"]["planted"][:3]), "3 planted defects, where",
    ),
    "bounds of its own": (PLANTED, lambda r: r["results"]["bounds"].update(partial=1e9), "forced: bounds"),
    "forced runs left out": (SMALL, lambda r: r["results"].update(forced=[]), "forced: 0 runs"),
    "a forced run beyond its bound": (
        SMALL, lambda r: r["results"]["forced"][0]["largest"].update(lse=1e9), "lse beyond",
    ),
    "real vLLM: another release booted": (REAL, lambda r: boot(r).update(vllm="0.30.0"), "engine vLLM 0.30.0, and it"),
    "real vLLM: another size booted": (
        REAL, lambda r: boot(r)["llm"].update(decode_context_parallel_size=1), "decode_context_parallel_size 1, and",
    ),
    "real vLLM: a rung that was not booted": (REAL, lambda r: r["results"]["boots"].pop("as installed"), "not booted"),
    "packing that was not applied": (PACK, lambda r: r["results"]["pack"][2].update(plugin=[]), "the log says False"),
    "packing left out": (PACK, lambda r: r["results"]["pack"].pop(), "pack: 3 works"),
    "packing at no time": (PACK, lambda r: r["results"]["pack"][0].update(ms=[0.0]), "[0.0] ms"),
    "packing at another size": (PACK, lambda r: r["results"].update(dcp=4), "and it is 4"),
    "a rung left out": (LADDER, lambda r: drop(r, "+K rows"), "a ladder without +K rows"),
    "a kernel that was wrong": (KERNELS, lambda r: r["results"]["kernels"][0].update(error=1.0), "kernel, "),
    "a kernel faster than its memory": (KERNELS, lambda r: r["results"]["kernels"][0].update(floor_us=1e6), "kernel, "),
    "no kernel": (KERNELS, lambda r: r["results"].update(kernels=[]), "a benchmark of no kernel"),
    "a verification's verdict": (VERIFY, lambda r: r["results"].update(verdict="fine"), "verification: fine"),
    "the same false digest at every size": (VERIFY, lambda r: every(r, "sha256", "0" * 64), "sha256"),
    "tokens against their digest": (VERIFY, lambda r: rows(r)[0]["tokens"].reverse(), "sha256"),
    "tokens against their text": (VERIFY, lambda r: rewrite_tokens(rows(r)[0], [1, 2]), "text "),
    "tokens of no corpus": (VERIFY, lambda r: rewrite_tokens(rows(r)[0], [10**9]), "text "),
    "a billion ulps and the same": (VERIFY, lambda r: rows(r)[-1].update(ulps=1e9), "1000000000.0 ulps and"),
    "far apart and the same": (VERIFY, lambda r: rows(r)[-1].update(apart=0.9, ulps=180.0), "the same, with 0.9"),
    "no number and the same": (VERIFY, lambda r: rows(r)[-1].update(ulps=None), "that are no numbers"),
    "another first token": (VERIFY, lambda r: rows(r)[-1].update(first_token=3), "first_token 3"),
    "identical logits that are not": (VERIFY, lambda r: rows(r)[-1].update(logits_identical=True), "identical True"),
    "digests that are none": (VERIFY, lambda r: rows(r)[-1]["logits"].__setitem__(0, "x"), "no digest of the logits"),
    "a digest too few": (VERIFY, lambda r: rows(r)[-1]["logits"].pop(), "no digest of the logits"),
    "one digest for all steps": (VERIFY, lambda r: rows(r)[-1].update(logits=["a" * 64] * 16), "two steps"),
    "a run that is left out": (VERIFY, lambda r: rows(r).pop(), "where settings ask for others"),
    "no run": (VERIFY, lambda r: r["results"].update(rows=[]), "0 runs"),
    "ok with an odd rank": (VERIFY, lambda r: r["results"].update(odd_ranks=[1]), "odd ranks"),
    "ok with a row that differs": (VERIFY, lambda r: rows(r)[-1].update(same=False), "ok, with 1 runs that differ"),
    "a wrong answer called right": (LADDER, lambda r: answer(r, "unpatched").update(right=True), "right True, and"),
    "another first difference": (LADDER, lambda r: answer(r).update(first_difference=4), "first_difference 4"),
    "false equality": (LADDER, lambda r: answer(r, "unpatched").update(first_difference=None), "difference None"),
    "a false share": (LADDER, lambda r: answer(r).update(commonest_share=0.1), "commonest_share 0.1"),
    "a reference of no margin": (LADDER, lambda r: answer(r, "DCP1").update(smallest_margin=None), "margin of None"),
    "a negative margin": (LADDER, lambda r: answer(r).update(smallest_margin=-1.0), "a margin of -1.0"),
    "a false count": (LADDER, lambda r: rows(r)[-1].update(equal=7), "equal 7"),
    "a false count of right ones": (LADDER, lambda r: rows(r)[-1].update(right=7), "right 7"),
    "no answers": (LADDER, lambda r: rows(r)[-1].update(answers=[]), "0 answers"),
    "no rung": (LADDER, lambda r: r["results"].update(rows=[]), "a ladder without a rung"),
    "a false verdict": (LADDER, lambda r: r["results"].update(repaired=False), "the verdict of a ladder"),
    "a bench of nothing": (BENCH, lambda r: r["results"].update(rows=[]), "a benchmark without a row"),
    "no time": (BENCH, lambda r: rows(r)[0].update(step_ms=0.0), "benchmark"),
    "bytes of one rank": (BENCH, lambda r: rows(r)[0].update(bytes=10), "10 bytes sent at DCP1"),
    "other planned bytes": (
        HOST, lambda r: r["results"]["parts"]["threads"]["workspace"][0].update(fixed_planned_bytes=1), "fixed 1",
    ),
    "a peak below the plan": (
        HOST, lambda r: r["results"]["parts"]["threads"]["workspace"][0].update(broken_peak_bytes=1), "peak 1",
    ),
    "the future": (VERIFY, lambda r: r.update(created="2099-01-01T00:00:00+00:00"), "created 2099"),
    "the past": (VERIFY, lambda r: r.update(created="1999-01-01T00:00:00+00:00"), "created 1999"),
    "a commit of zeros": (VERIFY, lambda r: r.update(commit="0" * 40), "commit 0000"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_told(name):
    sound, forge, said = FORGED[name]
    forged = copy.deepcopy(sound)
    forge(forged)
    assert any(said in sentence for sentence in contradictions(forged)), contradictions(forged)
