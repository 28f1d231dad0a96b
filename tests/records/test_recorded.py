"""Recorded runs: each committed record is whole, names nobody's machine, and holds tokens that a CPU computes today."""

import copy
import math
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.bench.costs import workspace_peak
from dcp_fix.engine.config import Config
from dcp_fix.engine.engine import Generation
from dcp_fix.ladder import ladder
from dcp_fix.ladder import report as ladder_report
from dcp_fix.learn import recorded_runs
from dcp_fix.records import records
from dcp_fix.records.fingerprints import checkpoint_terms
from dcp_fix.tiny import corpus
from dcp_fix.verify import report as verify_report
from dcp_fix.verify import verify
from tests.norm_rope_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
RECORDS = recorded_runs.load_all(ROOT / "notebooks/records")
MISSED = 0.1  # share of a class's prompts that the checkpoint may answer wrongly, at every DCP size alike
FEW = 5  # prompts of a class, below which all are to be right
COMPUTED = 2  # prompts of the class 512 that are answered here
CPU = {"cpu": "x", "cores": 2, "gpus": [], "driver": None}
TWO = CPU | {"gpus": ["NVIDIA H200"] * 2, "driver": "1"}


# --- the committed records --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def computed():
    """Tokens of DCP1 and of the last rung, here and now: {rung: a list per prompt}."""
    setup = ladder.load(corpus.CHECKPOINT, tp=4, dcp=4, stale="previous", device="cpu")
    prompts = corpus.prompts("512", COMPUTED)
    rungs = (ladder.REFERENCE, ladder.LAST)
    return {rung: [a.tokens for a in ladder.generate(setup, rung, "512", prompts)[0]] for rung in rungs}


def check(record, computed):
    """The digests are those of the tokens; the tokens are those of this CPU, and of MISSED at most not the answer."""
    answers, outcomes = recorded_runs.healthy_answers(record), recorded_runs.outcomes(record)
    of_times = recorded_runs.timings(record) or recorded_runs.kernels(record) or recorded_runs.packings(record)
    of_times = of_times or recorded_runs.cabinets(record)
    assert answers or outcomes or of_times, "no answer in this record"
    assert "failed" not in outcomes.values(), [name for name, outcome in outcomes.items() if outcome == "failed"]
    for name in {answer.prompt_class for answer in answers}:
        of_class = [answer for answer in answers if answer.prompt_class == name]
        prompts = corpus.prompts(name, 1 + max(answer.number for answer in of_class))
        for answer in of_class:
            assert answer.sha256 == equality.digest(answer.tokens), f"{name} {answer.number}: not its tokens' digest"
            if name == "512" and answer.number < COMPUTED:
                assert all(tokens[answer.number] == answer.tokens for tokens in computed.values())
        missed = {a.number for a in of_class if a.tokens != prompts[a.number].answer}
        few = len(prompts) < FEW
        assert len(missed) <= (0 if few else math.ceil(MISSED * len(prompts))), f"{name} {sorted(missed)}: not right"
    assert all(run["ok"] and all(each["named"] for each in run["planted"]) for run in recorded_runs.cabinets(record))
    for run in recorded_runs.verifications(record):
        assert run["ok"] and not run["odd_ranks"] and all(row["same"] for row in run["rows"])
        told = {name: value for name, value in run["settings"].items() if name.startswith("checkpoint ")}
        assert told == checkpoint_terms(corpus.CHECKPOINT), "of another checkpoint: record the run again"


@pytest.mark.parametrize("name", RECORDS)
def test_a_committed_record_holds_what_a_cpu_computes(name, computed):
    check(RECORDS[name], computed)
    commit, dirty = RECORDS[name]["commit"], RECORDS[name]["dirty"]
    assert len(commit) == 40 and dirty is False, "a record of no commit proves nothing about this code"
    paths = [word.split("=")[-1] for word in shlex.split(RECORDS[name]["command"]) if "/" in word]
    assert all((ROOT / path).exists() for path in paths), "name the file in a command without its folder"
    assert recorded_runs.facts(RECORDS[name])


def test_twenty_prompts_a_class_climb_the_ladder():
    """README: what each rung makes of 20 prompts, and which it leaves to luck."""
    rows = {(row["rung"], row["prompt_class"]): row for row in RECORDS["reproduce20_previous"]["results"]["rows"]}
    equal = {key: sum(a["first_difference"] is None for a in row["answers"]) for key, row in rows.items()}
    right = {name: sum(a["right"] for a in rows["DCP1", name]["answers"]) for name in corpus.CLASSES}
    assert right == {"512": 20, "1536": 20, "1024+1536": 19, "8192": 18}
    of_rung = {rung: [equal[rung, name] for name in corpus.CLASSES if (rung, name) in equal] for rung in ladder.RUNGS}
    assert of_rung["unpatched"] == of_rung["+query norm"] == [0, 0, 0]
    assert of_rung["+combine routing"] == [1, 20, 20]
    assert of_rung["+K rows"] == [20, 20, 20, 0] and rows["+K rows", "8192"]["failure"].startswith("workspace")
    assert of_rung["+workspace"] == [20, 20, 20, 20]


def test_a_dense_prompt_that_survives_unwritten_keys_is_lucky():
    """README: 1, 2 and 3 of 20 over three kinds of memory, none over all three, and by how little."""
    survivors, leads, healthy = {}, [], []
    for stale in ("previous", "zeros", "noise"):
        rows = {(r["rung"], r["prompt_class"]): r for r in RECORDS[f"reproduce20_{stale}"]["results"]["rows"]}
        answers = rows["+combine routing", "512"]["answers"]
        alive = {number for number, answer in enumerate(answers) if answer["first_difference"] is None}
        survivors[stale], leads = alive, leads + [answers[number]["smallest_margin"] for number in alive]
        healthy += [answer["smallest_margin"] for answer in rows["DCP1", "512"]["answers"]]
        assert rows["+K rows", "512"]["equal"] == rows["+workspace", "512"]["equal"] == len(answers) == 20
    assert {stale: len(alive) for stale, alive in survivors.items()} == {"previous": 1, "zeros": 2, "noise": 3}
    assert not set.intersection(*survivors.values())
    assert 0.06 <= min(leads) < 0.07 and min(healthy) >= 6.9


PACKED = "h200x2_vllm0300_packed"
REAL = [name for name in RECORDS if name.startswith("h200x2_vllm") and name != PACKED]


def real_rows(name):
    """{(rung, class, all at once): row} of a ladder in real vLLM."""
    (run,) = recorded_runs.real_ladders(RECORDS[name])
    return {(row["rung"], row["prompt_class"], row["batch"]): row for row in run["rows"]}


@pytest.mark.parametrize("name", REAL)
def test_real_vllm_at_dcp1_gives_the_tokens_of_our_engine_on_a_cpu(name):
    """README: 60 of 60 prompts, one by one and all at once."""
    ours = [answer for answer in recorded_runs.healthy_answers(RECORDS["reproduce20_previous"])]
    tokens = {(answer.prompt_class, answer.number): answer.tokens for answer in ours}
    theirs = [row for (rung, _, _), row in real_rows(name).items() if rung == "DCP1"]
    assert len(theirs) == 6
    for row in theirs:
        assert [a["tokens"] for a in row["answers"]] == [tokens[row["prompt_class"], n] for n in range(20)]


@pytest.mark.parametrize("name", ["h200x2_vllm0290", "h200x2_vllm0290_graphs"])
def test_029_is_wrong_as_installed_on_the_dense_path_alone_and_right_with_the_plugin(name):
    """README and page 08: 0.29.0 at DCP2, eager and compiled with CUDA graphs."""
    rows = real_rows(name)
    cured = {"with the plugin", "forced MQA"} & {rung for rung, _, _ in rows}
    assert "with the plugin" in cured
    for (rung, prompt_class, batch), row in rows.items():
        wrong = rung == "as installed" and prompt_class == "512"
        assert (row["equal"] < 20) is wrong, (rung, prompt_class, batch)
        assert not row["failure"] and (rung not in cured or row["nan"] == 0)
    assert any(answer["nan"] for answer in rows["as installed", "512", True]["answers"])


@pytest.mark.parametrize("name", ["h200x2_vllm0300", "h200x2_vllm0300_graphs"])
def test_030_is_healthy_as_installed(name):
    rows = real_rows(name)
    assert {row["equal"] for row in rows.values()} == {20} and {rung for rung, _, _ in rows} == {"DCP1", "as installed"}


@pytest.mark.parametrize("name", ["h200x2_vllm0290_put_back", "h200x2_vllm0300_put_back"])
def test_defects_put_back_into_real_vllm_break_it_as_they_did(name):
    """Query norm and routing break every answer; K rows those of the dense path alone."""
    for (rung, prompt_class, _), row in real_rows(name).items():
        if rung in ("unpatched", "+query norm"):
            assert row["equal"] == 0
        elif rung == "+combine routing":
            assert (row["equal"] < 20) is (prompt_class == "512")
    unpatched = real_rows(name)["unpatched", "1536", False]
    assert all(answer["nan"] for answer in unpatched["answers"])  # query rows that hold anything
    fluent = real_rows(name)["+query norm", "1536", False]
    assert not any(answer["nan"] for answer in fluent["answers"])


def test_packed_ids_give_real_vllm_the_answers_of_dcp1():
    """README: 40 of 40, with DCP_FIX_PACK=1 in both rungs' environment; in the second it had something to pack."""
    rows = [row for (rung, _, _), row in real_rows(PACKED).items() if rung == "with the plugin"]
    assert sum(row["equal"] for row in rows) == sum(len(row["answers"]) for row in rows) == 40
    (run,) = recorded_runs.real_ladders(RECORDS[PACKED])
    said = run["boots"]["with the plugin"]["log"]["plugin"]
    assert any(line.startswith("pack_and_cut applied") for line in said)
    assert "40 of 40" in (ROOT / "README.md").read_text()


def test_the_readme_says_what_packing_is_worth():
    (run,) = recorded_runs.packings(RECORDS["h200x2_pack0300"])
    ms = {(row["work"], row["packed"]): statistics.median(row["ms"]) for row in run["pack"]}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{ms['prefill', False]:.0f} to {ms['prefill', True]:.0f} ms" in readme
    assert f"{ms['decode', False]:.2f} to {ms['decode', True]:.2f} ms" in readme
    assert any(
        line.startswith("pack_and_cut applied") for row in run["pack"] if row["packed"] for line in row["plugin"]
    )
    assert not any("pack" in line for row in run["pack"] if not row["packed"] for line in row["plugin"])


def test_the_readme_counts_the_answers_of_real_vllm():
    readme = (ROOT / "README.md").read_text()
    for name, rung, said in (
        ("h200x2_vllm0290", "as installed", "as installed | **{}**"),
        ("h200x2_vllm0290_graphs", "as installed", "CUDA graphs **{}**"),
        ("h200x2_vllm0290", "forced MQA", "(a flag) | {}"),
        ("h200x2_vllm0290_graphs", "with the plugin", "with the plugin, eager and with CUDA graphs | {}"),
        ("h200x2_vllm0300_graphs", "as installed", "as installed, eager and with CUDA graphs | {}"),
        ("h200x2_vllm0300_put_back", "+combine routing", "K rows alone | 0; 0; {}"),
    ):
        equal = sum(row["equal"] for (of, _, _), row in real_rows(name).items() if of == rung)
        assert said.format(equal) in readme, (name, rung, equal)
    assert real_rows("h200x2_vllm0300_put_back")["+combine routing", "512", False]["equal"] == 0


def test_the_list_of_records_shows_every_record():
    sections = recorded_runs.markdown(ROOT / "notebooks/records")
    assert f"-->\n{sections}<!-- end of records -->" in (ROOT / "notebooks/records/README.md").read_text()


def test_every_case_of_the_fused_kernel_was_compiled_and_run():
    outcomes = recorded_runs.outcomes(RECORDS["h200_kernels"])
    node = "tests/gpu/test_gpu_kernels.py::test_every_case_compiled[{}]".format
    assert {name: outcomes.get(node(name)) for name in CASES} == dict.fromkeys(CASES, "passed") and len(CASES) >= 67


def test_every_page_ran_beside_a_gpu_with_the_outputs_of_a_cpu():
    outcomes = recorded_runs.outcomes(RECORDS["h200_notebooks"])
    pages = sorted((ROOT / "notebooks").glob("0[0-7]_*.ipynb"))
    for page in pages:
        cells = [cell for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "code"]
        names = [f"notebooks/{page.name}::Cell {number}" for number in range(len(cells))]
        assert [outcomes.get(name) for name in names] == ["passed"] * len(cells)
    assert len(pages) == 8


def logits_digests(run):
    """{(class, DCP size): digest per step} of a verification."""
    return {(row["prompt_class"], row["dcp"]): row["logits"] for row in run["rows"]}


def test_exact_mode_on_gpus_has_one_digest_per_step():
    """README: threads on one H200 and two over NCCL, every class and size, plain and as CUDA graphs."""
    host = [run for run in recorded_runs.verifications(RECORDS["h200x2_host"]) if run["settings"]["combine"] == "exact"]
    alone = [RECORDS[name]["results"] for name in ("h200_exact", "h200_exact_graphs")]
    for run in (*alone, *host):
        digests, sizes = logits_digests(run), run["settings"]["dcp"]
        assert len(digests) == len(corpus.CLASSES) * len(sizes)
        assert all(digests[name, size] == digests[name, sizes[0]] for name in corpus.CLASSES for size in sizes)
    assert logits_digests(alone[0]) == logits_digests(alone[1])
    other_transport = logits_digests(RECORDS["h200_exact_ag_rs"]["results"])
    assert len(other_transport) == 8 and other_transport.items() <= logits_digests(alone[0]).items()
    assert {(run["transport"], run["settings"]["tp"]) for run in host} == {("threads", 4), ("nccl", 2), ("gloo", 4)}


def test_transports_graphs_and_routes_have_the_same_bits():
    """README: the same sums in the same order; threads and processes that share GPUs, plain and CUDA graphs, a2a."""
    runs = {}
    for run in recorded_runs.verifications(RECORDS["h200x2_host"]):
        settings = run["settings"]
        group = settings["tp"], "exact" if settings["combine"] == "exact" else "ordinary"
        runs.setdefault(group, []).append(logits_digests(run))
    assert {group: len(same) for group, same in runs.items()} == {
        (4, "ordinary"): 6, (4, "exact"): 3, (2, "ordinary"): 4, (2, "exact"): 2,
    }  # fmt: skip
    assert all(digests == same[0] for same in runs.values() for digests in same)


def test_the_ordinary_combine_differs_where_it_combines():
    """README: a dense prefill combines nothing, so its first row of logits has the same bits; no later one has."""
    digests = logits_digests(RECORDS["h200_verify_graphs"]["results"])
    for size in (2, 4):
        assert digests["512", size][0] == digests["512", 1][0]
        assert not set(digests["512", size][1:]) & set(digests["512", 1][1:])
        assert not set(digests["8192", size]) & set(digests["8192", 1])


def test_the_readme_says_what_exact_mode_costs():
    rows = RECORDS["h200_bench"]["results"]["rows"]
    key = lambda row: (row["dcp"], row["context"], row["tokens"])  # noqa: E731
    ordinary = {key(row): row for row in rows if row["method"] == "a2a"}
    readme = " ".join((ROOT / "README.md").read_text().split())
    for dcp, classes in ((4, 4), (4, 8), (1, 8)):
        of = [row for row in rows if (row["dcp"], row["classes"]) == (dcp, classes)]
        times = [row["attend_ms"] / ordinary[key(row)]["attend_ms"] for row in of]
        assert f"D={dcp}, C={classes}: {min(times):.2f} to {max(times):.2f}" in readme
        assert all(row["bytes"] == ordinary[key(row)]["bytes"] for row in of)
    for method, said in (("a2a", "of the ordinary step with `a2a`"), ("ag_rs", "with `ag_rs`")):
        ordinary = {key(row): row for row in rows if row["method"] == method}
        steps = [row["step_ms"] / ordinary[key(row)]["step_ms"] for row in rows if row["dcp"] == 4 and row["classes"]]
        assert f"{min(steps):.2f} to {max(steps):.2f} {said}" in readme


ONE_OF_EACH = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise OSError
def test_breaks_afterwards(broken): pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_pytest_records_what_became_of_each_test(workers, tmp_path):
    (tmp_path / "test_it.py").write_text(ONE_OF_EACH)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--record", "it.json", *workers, "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    record = records.load_record(tmp_path / "it.json")
    assert done.returncode == 1 and record["command"].startswith("python -m pytest -q -p conftest --record it.json")
    assert recorded_runs.outcomes(record) == {
        "test_it.py::test_breaks_afterwards": "failed", "test_it.py::test_fails": "failed",
        "test_it.py::test_passes": "passed", "test_it.py::test_skipped": "skipped",
    }  # fmt: skip
    assert recorded_runs.facts(record) == ["test_it.py: 2 failed, 1 passed, 1 skipped"]
    with pytest.raises(AssertionError, match="test_fails"):
        check(record, {})


@pytest.mark.parametrize("raises, option, status", [("KeyboardInterrupt", "-q", 2), ("OSError", "-x", 1)])
def test_a_pytest_run_that_is_cut_short_leaves_no_record(raises, option, status, tmp_path):
    (tmp_path / "test_it.py").write_text(f"def test_stops(): raise {raises}\ndef test_more(): pass")
    command = [sys.executable, "-m", "pytest", option, "-p", "conftest", "--record", "it.json", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == status and not list(tmp_path.glob("*.json"))


# --- records of every kind, made without running anything -------------------------------------------------------------


def ladder_results(device="cpu"):
    """What `reproduce` writes if every rung answers one prompt rightly."""
    setup = ladder.Setup(None, device=device)
    (prompt,) = corpus.prompts("512", 1)
    answered = [Generation(prompt.answer, corpus_logits(prompt.answer), 0)]
    rows = [ladder.row(rung, "512", [prompt], answered, answered) for rung in (ladder.REFERENCE, *ladder.RUNGS)]
    return ladder_report.as_json(rows, 1, setup, ladder.repaired(rows, 1))


def corpus_logits(tokens):
    """Logits [steps, vocabulary] whose largest are `tokens`."""
    import torch

    return torch.nn.functional.one_hot(torch.tensor(tokens), len(corpus.WORDS)).float()


def verify_results(device="cpu", apart=0.0):
    """What `verify` writes for one prompt at two sizes whose logits lie `apart`."""
    settings = replace(verify.Settings(tp=2, dcp=(1, 2), classes=("512",)), device=device)
    (prompt,) = corpus.prompts("512", 1)
    logits = corpus_logits(prompt.answer)
    runs = [
        verify.Run(1, "512", 0, Generation(prompt.answer, logits, 0), []),
        verify.Run(2, "512", 0, Generation(prompt.answer, logits + apart, 0), []),
    ]
    rows = verify.compare(runs, settings, Config.from_json(corpus.CHECKPOINT / "config.json"))
    return verify_report.as_json(verify.Report(settings, "threads", ["x"], rows, []))


def as_record(results, hardware=CPU):
    return {"hardware": hardware, "results": results}


def host(device="cuda"):
    """What `multi-gpu` writes, as far as it is read here."""
    import torch

    part = {"ladder": ladder_results(device), "verify": [verify_results(device), verify_results(device, 1e-3)]}
    return {"parts": {"threads": part | {"workspace": [workspace_peak(2048, torch.device("cpu"))]}}, "summary": []}


def test_each_kind_of_record_says_what_it_holds():
    assert [line.split(",")[0] for line in recorded_runs.facts(as_record(ladder_results()))] == ["ladder"]
    lines = recorded_runs.facts(as_record(host(), TWO))
    assert len(lines) == 4 and lines[0].startswith("ladder, TP4: ")
    assert lines[1].endswith("every bit: yes") and lines[2].endswith("every bit: no")
    assert lines[3].startswith("workspace, 2048 rows: ")
    assert len(recorded_runs.healthy_answers(as_record(host()))) == 2 + 2 * 2


def test_a_rung_without_an_answer_says_why():
    results = ladder_results()
    results["rows"][-1]["failure"] = "workspace: too large"
    assert recorded_runs.facts(as_record(results))[1:] == ["no answer at +workspace, 512 tokens: workspace: too large"]


def test_times_are_counted_and_not_shown():
    timed = {"format": "fp8_ds_mla", "graph": True, "rows": [{"ms": 1.0}, {"ms": 2.0}]}
    assert recorded_runs.facts(as_record(timed, TWO)) == ["times: 2 rows, ordinary and exact side by side"]
    assert recorded_runs.has_gpu(as_record(timed, TWO)) and not recorded_runs.has_gpu(
        as_record(timed | {"graph": False}, TWO)
    )


def test_kernels_are_counted_and_not_shown():
    timed = {"kernels": [{"us": 1.0}, {"us": 2.0}], "ceilings": {}, "upstream": "vLLM 1.2"}
    said = "kernels: 2 times, each right by fp64 first, beside those of vLLM 1.2"
    assert recorded_runs.facts(as_record(timed, TWO)) == [said] and recorded_runs.has_gpu(as_record(timed, TWO))
    assert recorded_runs.facts(as_record(timed | {"upstream": None}))[0].endswith("alone")


def test_a_record_of_an_unknown_command_is_refused():
    with pytest.raises(UserError, match="results rows: of no command"):
        recorded_runs.facts(as_record({"rows": []}))


def test_facts_survive_a_second_recording():
    again = copy.deepcopy(host())
    for run in again["parts"]["threads"]["verify"]:
        for row in run["rows"]:
            row["ulps"] += 1.5
    assert recorded_runs.facts(as_record(again, TWO)) == recorded_runs.facts(as_record(host(), TWO))


def test_hardware_counts_gpus_only_where_they_took_part():
    assert recorded_runs.hardware(as_record(verify_results("cuda"), TWO)) == "2 x NVIDIA H200"
    assert recorded_runs.hardware(as_record(verify_results("cpu"), TWO)) == "CPU, x"
    assert recorded_runs.hardware(as_record(ladder_results(), CPU)) == "CPU, x"
    assert recorded_runs.has_gpu(as_record(host(), TWO)) and not recorded_runs.has_gpu(as_record(host("cpu"), TWO))


@pytest.mark.parametrize("results", [ladder_results, verify_results, host])
def test_a_record_with_one_other_token_is_caught(results, computed):
    made = as_record(results())
    check(made, computed)
    other = copy.deepcopy(made)
    tokens = recorded_runs.healthy_answers(other)[-1].tokens  # the list in the record itself
    tokens[0] += 1
    with pytest.raises(AssertionError, match="not its tokens' digest"):
        check(other, computed)
    with pytest.raises(AssertionError, match="no answer"):
        check(as_record({"parts": {}}), computed)


def test_a_record_of_another_checkpoint_is_caught(computed):
    made = as_record(verify_results())
    made["results"]["settings"]["checkpoint config.json"] = "0" * 16
    with pytest.raises(AssertionError, match="of another checkpoint"):
        check(made, computed)


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        records.record(tmp_path / f"{name}.json", "dcp-fix reproduce", ladder_results())
    assert list(recorded_runs.load_all(tmp_path)) == ["a", "b"] and recorded_runs.load_all(tmp_path / "none") == {}
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(UserError, match="not a whole JSON file"):
        recorded_runs.load_all(tmp_path)
