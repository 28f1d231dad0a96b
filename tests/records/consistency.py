"""What a record says against itself: everything in it that can be computed again, without the hardware that it names.

    contradictions(record)       [] for a sound record, else a sentence for each false number

Recomputed are digests and texts of tokens, right answers, what differs from DCP1 and where, shares, counts, verdicts,
planned bytes. Not the logits' digests and the times: those need the machine (README, "Reliability").

It does not: check the schema (records.py), or whether the commit exists (a test does, in a checkout).
"""

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from dcp_fix import broken, workspace
from dcp_fix.base import equality
from dcp_fix.ladder import ladder
from dcp_fix.learn import recorded_runs
from dcp_fix.tiny import corpus
from dcp_fix.workspace import H200_SMS
from tests.records.consistency_real import in_real_ladder

FIRST_YEAR = 2025
DIGEST = re.compile("[0-9a-f]{64}")
EPS = {"bfloat16": 2.0**-7, "float32": 2.0**-23}
FASTER = 1.5  # than the floor of a copy through memory: a cache may serve a part
MOST_APART = 0.05  # of the largest logit, where two runs are said to be the same


def contradictions(record: dict) -> list[str]:
    """Every sentence that the record says against itself."""
    found = list(outside(record))
    for run in recorded_runs.ladders(record):
        found += in_ladder(run)
    for run in recorded_runs.verifications(record):
        found += in_verification(run)
    for run in recorded_runs.real_ladders(record):
        found += in_real_ladder(run)
    for run in recorded_runs.cabinets(record):
        found += in_cabinet(run)
    for run in recorded_runs.timings(record):
        found += in_timings(run)
    for run in recorded_runs.kernels(record):
        found += in_kernels(run)
    for part in recorded_runs.parts(record):
        found += [text for row in part.get("workspace", ()) for text in in_workspace(row)]
    if "tests" in record["results"] and not recorded_runs.outcomes(record):
        found.append("a record of no test")
    return found


def outside(record: dict) -> Iterator[str]:
    """The record itself: made after the project began and not in the future, at a commit that is one."""
    created = datetime.fromisoformat(record["created"])
    if not FIRST_YEAR <= created.year or created > datetime.now(UTC) + timedelta(days=1):
        yield f"created {record['created']}"
    if record["commit"] is not None and len(set(record["commit"])) < 3:
        yield f"commit {record['commit']} is none"


# --- answers ----------------------------------------------------------------------------------------------------------


def in_answer(name: str, answer: dict) -> Iterator[str]:
    """Tokens against their text and digest."""
    if not answer["tokens"] or not all(type(t) is int and 0 <= t < len(corpus.WORDS) for t in answer["tokens"]):
        yield f"{name}: tokens that are none of the corpus"
        return
    if answer["sha256"] != equality.digest(answer["tokens"]):
        yield f"{name}: {answer['sha256'][:8]} is not the digest of its tokens"
    if answer["text"] != corpus.decode(answer["tokens"]):
        yield f"{name}: a text that is not its tokens'"


def in_ladder(run: dict) -> Iterator[str]:
    """A ladder: every answer, its comparison with DCP1's, and the verdict."""
    if not run["rows"]:
        yield "a ladder without a rung"
        return
    reference = {row["prompt_class"]: row["answers"] for row in run["rows"] if row["rung"] == ladder.REFERENCE}
    for row in run["rows"]:
        name = f"{row['rung']}, {row['prompt_class']}"
        expected = 0 if row["failure"] else run["prompts"]
        if len(row["answers"]) != expected or row["prompt_class"] not in reference:
            yield f"{name}: {len(row['answers'])} answers, or none of DCP1, where {expected} were asked"
            continue
        prompts = corpus.prompts(row["prompt_class"], run["prompts"])
        for number, (answer, prompt) in enumerate(zip(row["answers"], prompts, strict=False)):
            yield from in_answer(f"{name}, {number}", answer)
            yield from judged(f"{name}, {number}", answer, prompt, reference[row["prompt_class"]][number])
        if row["right"] != sum(answer["right"] for answer in row["answers"]):
            yield f"{name}: {row['right']} right"
        if row["equal"] != sum(answer["first_difference"] is None for answer in row["answers"]):
            yield f"{name}: {row['equal']} equal"
    yield from ladder_verdict(run)


def judged(name: str, answer: dict, prompt, reference: dict) -> Iterator[str]:
    """One answer of a rung against the corpus and DCP1's."""
    tokens = answer["tokens"]
    truth = {
        "right": tokens == prompt.answer,
        "first_difference": equality.first_difference(tokens, reference["tokens"]),
        "commonest_share": max(map(tokens.count, tokens)) / len(tokens),
        "cached": answer["cached"] if 0 <= answer["cached"] < len(prompt.ids) else None,
    }
    yield from (
        f"{name}: {key} {answer[key]}, and it is {value}" for key, value in truth.items() if answer[key] != value
    )
    margin = answer["smallest_margin"]  # None: a logit was no number, as no reference has it
    if (margin is None and answer is reference) or (margin is not None and not 0 <= margin < math.inf):
        yield f"{name}: a margin of {margin}"


def ladder_verdict(run: dict) -> Iterator[str]:
    """Whether it was repaired, and the sentence that says so."""
    of = lambda rung: [row for row in run["rows"] if row["rung"] == rung]  # noqa: E731
    first, last = of(ladder.FIRST), of(ladder.LAST)
    repaired = bool(first and last) and not any(r["equal"] for r in first)
    repaired = repaired and all(r["equal"] == run["prompts"] for r in last)
    counts = [f"{sum(r['equal'] for r in rows)} of {run['prompts'] * len(rows)}" for rows in (first, last)]
    if run["repaired"] is not repaired or not all(count in run["verdict"] for count in counts):
        yield f"the verdict of a ladder: {run['verdict']}"


# --- two DCP sizes ----------------------------------------------------------------------------------------------------


def in_verification(run: dict) -> Iterator[str]:
    """A verification: every row against the same prompt at the first DCP size, and the verdict."""
    settings, rows = run["settings"], run["rows"]
    key = lambda row: (row["prompt_class"], row["number"])  # noqa: E731
    reference = {key(row): row for row in rows if row["dcp"] == settings["dcp"][0]}
    if len(rows) != len(settings["dcp"]) * len(settings["classes"]) * settings["prompts"]:
        yield f"{len(rows)} runs, where settings ask for another number"
    for row in rows:
        name = f"DCP{row['dcp']}, {row['prompt_class']}, {row['number']}"
        yield from in_answer(name, row)
        if key(row) not in reference:
            yield f"{name}: nothing to compare it with"
            continue
        yield from compared(name, row, reference[key(row)], EPS[run["dtype"]])
    bad = [row for row in rows if not row["same"] or (settings["logits"] and not row["logits_identical"])]
    if run["ok"] and (bad or run["odd_ranks"]):
        yield f"ok, with {len(bad)} runs that differ and odd ranks {run['odd_ranks']}"
    for row in run.get("forced", ()):
        yield from in_forced(row, run["bounds"])
        if run["ok"] and not row["ok"]:
            yield f"ok, and DCP{row['dcp']} parts from DCP1 on {row['case']}"
    if run["ok"] is not (" the same " in run["verdict"]):
        yield f"the verdict of a verification: {run['verdict']}"


def compared(name: str, row: dict, reference: dict, eps: float) -> Iterator[str]:
    """One run against the reference."""
    if row["first_token"] != equality.first_difference(row["tokens"], reference["tokens"]):
        yield f"{name}: first other token {row['first_token']}"
    if len(row["logits"]) != len(row["tokens"]) or not all(DIGEST.fullmatch(digest) for digest in row["logits"]):
        yield f"{name}: no digest of the logits for every token"
    if len(set(row["logits"])) < len(row["logits"]):
        yield f"{name}: two steps with the same logits"
    identical = row["logits"] == reference["logits"]
    if row["logits_identical"] is not identical:
        yield f"{name}: logits called {'' if row['logits_identical'] else 'not '}identical"
    ulps, apart = row["ulps"], row["apart"]
    if ulps is None or apart is None:
        if row["same"]:
            yield f"{name}: the same, with logits that are no numbers"
    elif identical and (ulps, apart) != (0, 0):
        yield f"{name}: identical logits {ulps} ulps apart"
    elif not apart / 2 - eps <= ulps * eps <= 2 * apart + eps:  # a unit of the largest logit is eps/2 .. eps of it
        yield f"{name}: {ulps} ulps and {apart} of the largest logit"
    if row["same"] and (row["first_token"] is not None or (apart or 0) > MOST_APART):
        yield f"{name}: the same, with {apart} apart and first other token {row['first_token']}"


# --- step by step -----------------------------------------------------------------------------------------------------


def in_forced(row: dict, bounds: dict[str, float]) -> Iterator[str]:
    """A forced run: what it says of its largest differences, held against the bounds that stand beside it."""
    name = f"forced, DCP{row['dcp']}, {row['case']}"
    over = {step for step, size in row["largest"].items() if size is None or size > bounds.get(step, 0)}
    if row["first"] and row["first"]["bound"] == 0:  # where exact mode promises bits
        over.add(row["first"]["step"])
    if row["ok"] is not (row["first"] is None) or row["ok"] is bool(over):
        yield f"{name}: ok {row['ok']}, with {', '.join(sorted(over)) or 'no step'} beyond its bound"
    elif row["first"] and row["first"]["step"] not in over:
        yield f"{name}: parts at {row['first']['step']}, which is within its bound"


def in_cabinet(run: dict) -> Iterator[str]:
    """A cabinet: every run against its bounds, every planted defect caught where it shows, and the verdict."""
    for row in (*run["healthy"], *run["planted"]):
        yield from in_forced(row, run["bounds"])
    for row in run["planted"]:
        if row["named"] is not (row["first"] is not None and row["first"]["step"] == row["shows"]):
            yield f"planted {row['name']}: named {row['named']}, and it parts at {row['first']}"
    passed, names = sum(row["ok"] for row in run["healthy"]), {row["name"] for row in run["planted"]}
    named = sum(all(row["named"] for row in run["planted"] if row["name"] == name) for name in names)
    ok = passed == len(run["healthy"]) > 0 and named == len(names) > 0
    said = f"{passed} of {len(run['healthy'])} healthy runs pass; {named} of {len(names)} planted"
    if run["ok"] is not ok or not run["verdict"].startswith(said):
        yield f"the verdict of a cabinet: {run['verdict']}"


# --- bytes and times --------------------------------------------------------------------------------------------------


def in_workspace(row: dict) -> Iterator[str]:
    """Planned bytes, which are arithmetic; a measured peak holds at least those."""
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
