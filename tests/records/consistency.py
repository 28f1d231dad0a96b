"""What a record says against itself: everything in it that can be computed again, without the hardware that it names.

    contradictions(record)       [] for a sound record, else a sentence for each false number

Recomputed are digests and texts of tokens, right answers, what differs from DCP1 and where, shares, counts, verdicts,
bounds, which runs there must be, planned bytes. Not the logits' digests, the margins and the times: those need the
machine.
"""

import functools
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import torch

from dcp_fix import broken, planted, workspace
from dcp_fix.base import equality
from dcp_fix.combine import METHODS
from dcp_fix.kv_cache import CACHE_FORMATS
from dcp_fix.ladder import ladder
from dcp_fix.learn import recorded_runs
from dcp_fix.tiny import corpus
from dcp_fix.verify import forced, steps
from dcp_fix.workspace import H200_SMS

FIRST_YEAR = 2025
DIGEST = re.compile("[0-9a-f]{64}")
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
FASTER = 1.5  # than the floor of a copy through memory: a cache may serve a part
MOST_APART = 0.05  # of the largest logit, where two runs are said to be the same
PLUGIN = "with the plugin"
HEALTHY = (ladder.REFERENCE, "forced MQA", PLUGIN)  # rungs in real vLLM that must be right
prompts_of = functools.cache(corpus.prompts)  # every rung is asked the same


def contradictions(record: dict) -> list[str]:
    """Every sentence that the record says against itself."""
    found = list(outside(record))
    for kind, check in CHECKS.items():
        found += [text for run in kind(record) for text in check(run)]
    return found


def outside(record: dict) -> Iterator[str]:
    """The record itself: made after the project began and not in the future, at a commit that is one."""
    created = datetime.fromisoformat(record["created"])
    if not FIRST_YEAR <= created.year or created > datetime.now(UTC) + timedelta(days=1):
        yield f"created {record['created']}"
    if record["commit"] is not None and len(set(record["commit"])) < 3:
        yield f"commit {record['commit']} is none"
    if not recorded_runs.runs(record):
        yield "a record of nothing"


def false(name: str, found: dict, truth: dict) -> Iterator[str]:
    """A sentence for each value of `truth` that `found` has otherwise."""
    yield from (f"{name}: {key} {found[key]}, and it is {value}" for key, value in truth.items() if found[key] != value)


# --- ladders ----------------------------------------------------------------------------------------------------------


def in_rows(run: dict, asked: bool) -> Iterator[str]:
    """Every answer of a ladder beside DCP1's of the same class. `asked`: the corpus, so that the right one is known."""
    if not run["rows"]:
        yield "a ladder without a rung"
    key = lambda row: (row["prompt_class"], row.get("batch"))  # noqa: E731
    reference = {key(row): row["answers"] for row in run["rows"] if row["rung"] == ladder.REFERENCE}
    for row in run["rows"]:
        name, theirs = f"{row['rung']}, {row['prompt_class']}", reference.get(key(row), [])
        if len(row["answers"]) != (0 if row["failure"] else run["prompts"]) or len(theirs) != run["prompts"]:
            yield f"{name}: {len(row['answers'])} answers and {len(theirs)} of DCP1, where {run['prompts']} were asked"
            continue
        prompts = prompts_of(row["prompt_class"], run["prompts"]) if asked else [None] * run["prompts"]
        for number, (answer, *given) in enumerate(zip(row["answers"], theirs, prompts, strict=False)):
            yield from false(f"{name}, {number}", answer, answer_of(answer, *given))
        yield from false(name, row, counts(row))


def answer_of(answer: dict, theirs: dict, prompt) -> dict:
    """What an answer's tokens and logprobs make of its other fields. `prompt` None: nobody here knows its answer."""
    tokens = answer["tokens"]
    same = equality.first_difference(tokens, theirs["tokens"])
    known = {"right": tokens == prompt.answer, "text": corpus.decode(tokens)} if prompt else {}
    if "logprobs" in answer:
        pairs = [pair for pair in zip(answer["logprobs"], theirs["logprobs"], strict=False)][:same]
        apart = max((abs(a - b) for a, b in pairs if None not in (a, b)), default=None)
        known |= {"nan": answer["logprobs"].count(None), "logprob_difference": apart}
    return known | {
        "sha256": equality.digest(tokens),
        "first_difference": same,
        "commonest_share": max(map(tokens.count, tokens)) / len(tokens) if tokens else 0.0,
    }


def counts(row: dict) -> dict:
    """What a row says of its answers."""
    answers = row["answers"]
    told = {"right": sum(a["right"] for a in answers), "equal": sum(a["first_difference"] is None for a in answers)}
    return told | ({"nan": sum(answer["nan"] > 0 for answer in answers)} if "nan" in row else {})


def in_ladder(run: dict) -> Iterator[str]:
    """A ladder: every answer, which rungs there must be, and the verdict."""
    yield from in_rows(run, asked=True)
    for row in run["rows"]:
        for answer in row["answers"]:
            margin = answer["smallest_margin"]  # None: a logit was no number, as no reference has it
            if margin is None and row["rung"] == ladder.REFERENCE or margin is not None and not 0 <= margin < math.inf:
                yield f"{row['rung']}, {row['prompt_class']}: a margin of {margin}"
    rungs = {row["rung"] for row in run["rows"]}
    if missing := {ladder.REFERENCE, *ladder.RUNGS} - rungs:
        yield f"a ladder without {', '.join(sorted(missing))}"
    first, last = ([row for row in run["rows"] if row["rung"] == rung] for rung in (ladder.FIRST, ladder.LAST))
    repaired = bool(first and last) and not any(row["equal"] for row in first)
    repaired = repaired and all(row["equal"] == run["prompts"] for row in last)
    said = [f"{sum(row['equal'] for row in rows)} of {run['prompts'] * len(rows)}" for rows in (first, last)]
    if run["repaired"] is not repaired or not all(count in run["verdict"] for count in said):
        yield f"the verdict of a ladder: {run['verdict']}"


def whole(rows: list[dict], prompts: int) -> bool:
    """Whether every answer of some rows is DCP1's; one with a logprob that is no number proves nothing."""
    return all(not row["failure"] and row["equal"] == prompts and not row["nan"] for row in rows)


def in_real_ladder(run: dict) -> Iterator[str]:
    """The same in real vLLM; every rung was booted, by the release and with the sizes that the record names."""
    yield from in_rows(run, asked=isinstance(run["terms"]["model"], dict))  # and not another model's name
    for rung in dict.fromkeys(row["rung"] for row in run["rows"]):
        boot = run["boots"].get(rung)
        if boot is None:
            yield f"{rung} was not booted"
            continue
        sizes = {"tensor_parallel_size": run["tp"]}
        sizes |= {} if rung == ladder.REFERENCE else {"decode_context_parallel_size": run["dcp"]}
        yield from false(f"boot of {rung}", boot | {"engine": f"vLLM {boot['vllm']}"}, {"engine": run["engine"]})
        yield from false(f"boot of {rung}", boot["llm"], sizes)
    cured = [row for row in run["rows"] if row["rung"] == PLUGIN]
    sick = [row for row in run["rows"] if row["rung"] not in HEALTHY]
    yield from false(
        "a ladder in real vLLM",
        run,
        {"repaired": bool(cured) and whole(cured, run["prompts"]) and bool(sick) and not whole(sick, run["prompts"])},
    )
    for rung in dict.fromkeys(row["rung"] for row in run["rows"] if row["rung"] != ladder.REFERENCE):
        equal = [row["equal"] for row in run["rows"] if row["rung"] == rung]
        if f"{sum(equal)} of {run['prompts'] * len(equal)} {rung}" not in run["verdict"]:
            yield f"the verdict of a ladder in real vLLM: {run['verdict']}"


# --- two DCP sizes ----------------------------------------------------------------------------------------------------


def in_verification(run: dict) -> Iterator[str]:
    """A verification: every row against the same prompt at the first DCP size, and the verdict."""
    settings, rows = run["settings"], run["rows"]
    key = lambda row: (row["prompt_class"], row["number"])  # noqa: E731
    reference = {key(row): row for row in rows if row["dcp"] == settings["dcp"][0]}
    passes = settings.get("passes", ["free"])
    classes = settings["classes"] if "free" in passes else ()
    asked = {(size, name, n) for size in settings["dcp"] for name in classes for n in range(settings["prompts"])}
    if asked != {(row["dcp"], *key(row)) for row in rows} or len(rows) != len(asked):
        yield f"{len(rows)} runs, where settings ask for others"
        return
    for row in rows:
        name = f"DCP{row['dcp']}, {row['prompt_class']}, {row['number']}"
        yield from compared(name, row, reference[key(row)], torch.finfo(getattr(torch, run["dtype"])).eps)
    bad = [row for row in rows if not row["same"] or (settings["logits"] and not row["logits_identical"])]
    if run["ok"] and (bad or run["odd_ranks"]):
        yield f"ok, with {len(bad)} runs that differ and odd ranks {run['odd_ranks']}"
    if "forced" in passes:
        cases = [*settings["classes"], *(case.name for case in forced.small_cases())]
        wanted = {(name, size) for name in cases for size in settings["dcp"] if size > 1}
        yield from in_forced(run, run["forced"], wanted)
        if run["ok"] and not all(row["ok"] for row in run["forced"]):
            yield "ok, and a sublayer parts from DCP1"
    if run["ok"] is not (" the same " in run["verdict"]):
        yield f"the verdict of a verification: {run['verdict']}"


def compared(name: str, row: dict, reference: dict, eps: float) -> Iterator[str]:
    """One run against the reference."""
    tokens = row["tokens"]
    truth = {
        "sha256": equality.digest(tokens),
        "text": corpus.decode(tokens),
        "first_token": equality.first_difference(tokens, reference["tokens"]),
        "logits_identical": row["logits"] == reference["logits"],
    }
    yield from false(name, row, truth)
    if len(row["logits"]) != len(tokens) or not all(DIGEST.fullmatch(digest) for digest in row["logits"]):
        yield f"{name}: no digest of the logits for every token"
    if len(set(row["logits"])) < len(row["logits"]):
        yield f"{name}: two steps with the same logits"
    ulps, apart = row["ulps"], row["apart"]
    if ulps is None or apart is None:
        if row["same"]:
            yield f"{name}: the same, with logits that are no numbers"
    elif row["logits"] == reference["logits"] and (ulps, apart) != (0, 0):
        yield f"{name}: identical logits {ulps} ulps apart"
    elif not apart / 2 - eps <= ulps * eps <= 2 * apart + eps:  # a unit of the largest logit is eps/2 .. eps of it
        yield f"{name}: {ulps} ulps and {apart} of the largest logit"
    if row["same"] and (row["first_token"] is not None or (apart or 0) > MOST_APART):
        yield f"{name}: the same, with {apart} apart and first other token {row['first_token']}"


def in_forced(run: dict, rows: list[dict], wanted: set) -> Iterator[str]:
    """Forced runs: all that there must be (case, DCP), and their largest differences held against our bounds."""
    bounds = steps.BOUNDS[DTYPES[run["settings"]["device"].split(":")[0]]]
    yield from false("forced", run, {"bounds": bounds})
    if wanted != {(row["case"], row["dcp"]) for row in rows}:
        yield f"forced: {len(rows)} runs, where settings ask for others"
    for row in rows:
        over = {step for step, size in row["largest"].items() if size is None or size > bounds.get(step, 0)}
        if row["first"] and row["first"]["bound"] == 0:  # where exact mode promises bits
            over.add(row["first"]["step"])
        if row["ok"] is not (row["first"] is None) or row["ok"] is bool(over):
            yield f"forced, {row['case']}: ok {row['ok']}, with {', '.join(sorted(over)) or 'no step'} beyond its bound"
        elif row["first"] and row["first"]["step"] not in over:
            yield f"forced, {row['case']}: parts at {row['first']['step']}, which is within its bound"


def in_all_planted(run: dict) -> Iterator[str]:
    """Every healthy configuration, every planted defect caught where it shows, and the verdict."""
    sizes, settings = [size for size in run["settings"]["dcp"] if size > 1], run["settings"]
    cases = [*settings["classes"], *(case.name for case in forced.small_cases())]
    yield from in_forced(run, run["healthy"], {(name, size) for name in cases for size in sizes})
    shown = {(plant.case, size) for plant in planted.PLANTS.values() for size in sizes}
    yield from in_forced(run, run["planted"], shown)
    configurations = (
        len(cases) + len(CACHE_FORMATS) - 1 + (len(METHODS) - 1) * (len(cases) - len(settings["classes"]) + 1)
    )
    if len(run["healthy"]) != configurations * len(sizes):
        yield f"{len(run['healthy'])} healthy runs, where there are {configurations} configurations"
    wanted = [(name, size) for name in planted.PLANTS for size in sizes]
    if wanted != [(row["name"], row["dcp"]) for row in run["planted"]]:
        yield f"{len(run['planted'])} planted defects, where there are {len(wanted)}"
    for row in run["planted"]:
        shows = planted.PLANTS[row["name"]].shows
        named = row["first"] is not None and row["first"]["step"] == shows
        yield from false(f"planted {row['name']}", row, {"shows": shows, "named": named})
    passed = sum(row["ok"] for row in run["healthy"])
    caught = sum(all(row["named"] for row in run["planted"] if row["name"] == name) for name in planted.PLANTS)
    said = f"{passed} of {len(run['healthy'])} healthy runs pass; {caught} of {len(planted.PLANTS)} planted"
    ok = passed == len(run["healthy"]) and caught == len(planted.PLANTS)
    if run["ok"] is not ok or not run["verdict"].startswith(said):
        yield f"the verdict of all planted: {run['verdict']}"


# --- bytes and times --------------------------------------------------------------------------------------------------


def in_workspaces(run: dict) -> Iterator[str]:
    """Planned bytes, which are arithmetic; a measured peak holds at least those."""
    for row in run["workspace"]:
        sizes = row["tokens"], row["heads"], row["topk"], H200_SMS
        for name, plan in (("fixed", workspace.plan), ("broken", broken.plan_always_allocate)):
            planned, peak = row[f"{name}_planned_bytes"], row[f"{name}_peak_bytes"]
            if planned != plan(*sizes).bytes or (peak is not None and peak < planned):
                yield f"workspace, {row['tokens']} rows: {name} {planned} planned, peak {peak}"


def in_timings(run: dict) -> Iterator[str]:
    """Times above 0, sizes that a benchmark can have, bytes that a step of one rank alone does not send."""
    if not run["rows"]:
        yield "a benchmark without a row"
    for row in run["rows"]:
        if not (0 < row["attend_ms"] < 1e6 and 0 < row["step_ms"] < 1e6 and row["topk"] <= row["context"]):
            yield f"benchmark, {row}"
        if (row["bytes"] > 0) is not (row["dcp"] > 1):
            yield f"benchmark: {row['bytes']} bytes sent at DCP{row['dcp']}"


def in_kernels(run: dict) -> Iterator[str]:
    """Kernels: right before they were timed, times in order and not below what the hardware can do."""
    if not run["kernels"]:
        yield "a benchmark of no kernel"
    for row in run["kernels"]:
        ordered = 0 < row["low"] <= row["us"] <= row["high"] < 1e9 and row["floor_us"] <= FASTER * row["us"]
        if not ordered or not 0 <= row["error"] <= row["allowed"]:
            yield f"kernel, {row}"


def in_packings(run: dict) -> Iterator[str]:
    """Both works without and with packing, which vLLM's log tells; sizes as it was told them."""
    if [(row["work"], row["packed"]) for row in run["pack"]] != [
        (w, p) for p in (False, True) for w in ("prefill", "decode")
    ]:
        yield f"pack: {len(run['pack'])} works"
    for row in run["pack"]:
        applied = any(line.startswith("pack_and_cut applied") for line in row["plugin"])
        if applied is not row["packed"] or not row["ms"] or not all(0 < ms < 1e6 for ms in row["ms"]):
            yield f"pack, {row['work']}: packed {row['packed']}, and the log says {applied}; {row['ms']} ms"
    sizes = {"tensor_parallel_size": run["tp"], "decode_context_parallel_size": run["dcp"]}
    yield from false("pack", run["llm"], sizes)


CHECKS = {
    recorded_runs.ladders: in_ladder,
    recorded_runs.real_ladders: in_real_ladder,
    recorded_runs.verifications: in_verification,
    recorded_runs.all_planted: in_all_planted,
    recorded_runs.workspaces: in_workspaces,
    recorded_runs.timings: in_timings,
    recorded_runs.kernels: in_kernels,
    recorded_runs.packings: in_packings,
}
