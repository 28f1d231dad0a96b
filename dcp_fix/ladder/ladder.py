"""The repair ladder: the same prompts at DCP1 and, with one defect fewer on every rung, at DCP4.

    unpatched          all four defects
    +query norm        every rank norms every query row                       vLLM issue 50095, PR 50005
    +combine routing   query gather and LSE combine under plain DCP           vLLM issue 50095, PR 50005
    +K rows            every rank materialises every new K row                vLLM issue 54907, PR 54908
    +workspace         split-KV accumulators only where something is split    vLLM issue 53413, PR 53755

A class is climbed before the next one begins, so that the first garbage is there after seconds and the long prompt is
last. Each rung and class has engines of its own, so no rung sees memory that another one wrote. A rung that fails (the
historical workspace plan exceeds its budget on the long prompt) is a result like any other. What unwritten memory holds
is decided in scratch.py, so the garbage is the same on every run.

A rung is judged by equality of its tokens with DCP1's, then by right answers. The share of the commonest token is
reported but measures nothing: a better rung may repeat itself more.

It does not: time anything, or decide how the outputs look inside the model (notebooks do).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_fix import broken
from dcp_fix.base import equality
from dcp_fix.base.errors import DIFFERS, UserError
from dcp_fix.base.output import to_stdout
from dcp_fix.engine.checkpoint import check_folder
from dcp_fix.engine.config import Config
from dcp_fix.engine.engine import GIB, Engine, Generation, default_dtype, resolve_device
from dcp_fix.engine.model import Model
from dcp_fix.engine.shard import check_dcp, check_tp
from dcp_fix.engine.sharded import Ops
from dcp_fix.ladder.reference import check_reference
from dcp_fix.ranks.group import Group, GroupError, LocalGroup
from dcp_fix.records import records
from dcp_fix.tiny import corpus
from dcp_fix.workspace import WorkspaceError

UNROUTED, ALLOCATE = broken.attend_unrouted, broken.plan_always_allocate
RUNGS = {
    "unpatched": Ops(broken.norm_rope_skip_all_rows, UNROUTED, ALLOCATE),
    "+query norm": Ops(broken.norm_rope_skip_dense_rows, UNROUTED, ALLOCATE),
    "+combine routing": Ops(broken.norm_rope_skip_dense_rows, plan=ALLOCATE),
    "+K rows": Ops(plan=ALLOCATE),
    "+workspace": Ops(),
}
FIRST, LAST = next(iter(RUNGS)), list(RUNGS)[-1]
REFERENCE = "DCP1"
CLASSES = tuple(corpus.CLASSES)
LONG_RUNGS = {"8192": ("+K rows", "+workspace")}  # classes that only climb the last rungs: slow on a CPU
NEW_TOKENS = 24
BUDGET = GIB  # bytes for the split-KV workspace
OTHER_SEED, OTHER_TOKENS = 1, 256  # the request whose rows lie in the scratch memory: of another seed than the prompts


@dataclass(frozen=True)
class Setup:
    """What all runs of one ladder share."""

    model: Model
    tp: int = 4
    dcp: int = 4
    stale: str = "previous"
    device: str = "cpu"


@dataclass(frozen=True)
class Answer:
    """One prompt on one rung. `first_difference`: index of the first token that is not DCP1's, None if all are.

    `smallest_margin`: None where a logit is no number.
    """

    text: str
    tokens: list[int]
    sha256: str
    cached: int
    right: bool
    first_difference: int | None
    commonest_share: float
    smallest_margin: float | None


@dataclass(frozen=True)
class LadderRow:
    """One rung and class: an answer per prompt, or why there is none."""

    rung: str
    prompt_class: str
    answers: list[Answer]
    failure: str | None = None

    @property
    def right(self) -> int:
        """Prompts answered as the corpus wants them."""
        return sum(answer.right for answer in self.answers)

    @property
    def equal(self) -> int:
        """Prompts whose tokens are DCP1's."""
        return sum(answer.first_difference is None for answer in self.answers)


Answers = tuple[list[Generation], str | None]  # of a rung to the prompts of a class; or none, and why


def run(
    setup: Setup, prompts: int = 1, classes: Sequence[str] = CLASSES, rungs: Sequence[str] | None = None,
    progress: Callable | None = None, shown: Callable[[LadderRow], None] | None = None,
) -> list[LadderRow]:  # fmt: skip
    """Climb with the ranks as threads; `progress(rung, prompt_class, done, total)` counts rows times layers."""
    return climb(lambda rung, name, asked: generate(setup, rung, name, asked, progress), prompts, classes, rungs, shown)


def climb(
    answers: Callable[[str, str, list], Answers], prompts: int, classes: Sequence[str],
    rungs: Sequence[str] | None = None, shown: Callable[[LadderRow], None] | None = None,
) -> list[LadderRow]:  # fmt: skip
    """A row per class and rung, from DCP1 up; answers(rung, class, prompts) asks, shown(row) is called as rows come."""
    rows = []
    for name in classes:
        asked, reference = corpus.prompts(name, prompts), []
        for rung in (REFERENCE, *(rungs or RUNGS)):
            if rung not in (REFERENCE, *LONG_RUNGS.get(name, RUNGS)):
                continue
            generations, failure = answers(rung, name, asked)
            if rung == REFERENCE:
                reference = generations
                check_references(name, reference)
            rows.append(row(rung, name, asked, generations, reference, failure))
            if shown:
                shown(rows[-1])
    return rows


def check_references(name: str, generations: list[Generation]) -> None:
    """Raise UserError for an answer of DCP1 from which nothing follows."""
    for number, generation in enumerate(generations):
        check_reference(f"{REFERENCE}, {name} tokens, prompt {number}", generation.logits)


def generate(setup: Setup, rung: str, name: str, prompts: list, progress: Callable | None = None) -> Answers:
    """One rung's (or DCP1's) answers to the prompts of a class, by fresh engines; or no answers and the reason."""
    return on_threads(setup.tp, on_rank, setup, rung, name, prompts, progress, device=setup.device)


def on_threads(ranks: int, rank: Callable, *values, **options) -> Any:
    """What rank 0 makes of rank(group, *values) with a thread for each rank. Raises what a rank raised."""
    try:
        return LocalGroup.run(ranks, rank, *values, **options)[0]
    except GroupError as error:
        raise error.__cause__ or error from None


def on_rank(
    group: Group, setup: Setup, rung: str, name: str, prompts: list, progress: Callable | None = None
) -> Answers:
    """The same of one rank. Every rank plans alike, so a workspace beyond the budget ends them all."""
    report = (lambda done, total: progress(rung, name, done, total)) if progress and group.rank == 0 else None
    engine = make_engine(setup, rung, max(len(prompt.ids) for prompt in prompts), group)
    try:
        return [answer(engine, prompt.ids, corpus.CACHED.get(name, 0), report) for prompt in prompts], None
    except WorkspaceError as error:
        return [], f"workspace: {error}"


def make_engine(setup: Setup, rung: str, longest: int, group: Group) -> Engine:
    """One rank's engine, its scratch memory left behind by another request."""
    dcp, ops = (1, Ops()) if rung == REFERENCE else (setup.dcp, RUNGS[rung])
    engine = Engine(
        setup.model, group, dcp_size=dcp, ops=ops, stale=setup.stale, workspace_budget=BUDGET,
        max_length=longest + NEW_TOKENS, device=setup.device,
    )  # fmt: skip
    if setup.stale == "previous":
        engine.leave_rows(corpus.prompts("512", 1, OTHER_SEED)[0].ids[:OTHER_TOKENS])
    return engine


def answer(engine: Engine, ids: list[int], cached: int, report: Callable | None = None) -> Generation:
    """One greedy answer; its first `cached` tokens, if any, go through the engine as a request of their own first."""
    if cached:
        engine.generate(ids[:cached], 1)
    return engine.generate(ids, NEW_TOKENS, report)


def row(
    rung: str, name: str, prompts: list, generations: list[Generation], reference: list[Generation],
    failure: str | None = None,
) -> LadderRow:  # fmt: skip
    """Judge the generations of a rung against the corpus and against DCP1's."""
    judged = [] if failure else [judge(*three) for three in zip(prompts, generations, reference, strict=True)]
    return LadderRow(rung, name, judged, failure)


def judge(prompt: corpus.Prompt, generation: Generation, reference: Generation) -> Answer:
    """One generation against the right answer and DCP1's tokens."""
    tokens = generation.tokens
    return Answer(
        text=corpus.decode(tokens),
        tokens=tokens,
        sha256=equality.digest(tokens),
        cached=generation.cached,
        right=tokens == prompt.answer,
        first_difference=equality.first_difference(tokens, reference.tokens),
        commonest_share=Counter(tokens).most_common(1)[0][1] / len(tokens),
        smallest_margin=min(generation.margins) if generation.logits.isfinite().all() else None,
    )


def repaired(rows: list[LadderRow], prompts: int) -> bool:
    """Whether the last rung equals DCP1 on every prompt of every class, and the first rung on none."""
    first = [row.equal for row in rows if row.rung == FIRST]
    last = [row.equal for row in rows if row.rung == LAST]
    return bool(first and last) and not any(first) and all(equal == prompts for equal in last)


def main(
    prompts: int = 1, stale: str = "previous", json_path: Path | None = None, tp: int = 4, dcp: int = 4,
    device: str = "cpu", checkpoint: Path | None = None, classes: tuple[str, ...] = CLASSES,
) -> int:  # fmt: skip
    """Climb the ladder, print each row as it comes, write `json_path`; 0 if the fixes repair what was broken, else 1.

    Raises UserError for a damaged checkpoint, sizes that do not divide, a device that is not here, and for `classes`
    of which one is unknown or none climbs every rung.
    """
    from dcp_fix.ladder import report as ladder_report

    if dcp == 1:
        raise UserError("a DCP size of 1 is what the ladder compares with: choose another divisor of the TP size")
    check_classes(classes)
    setup = load(checkpoint or corpus.CHECKPOINT, tp, dcp, stale, device)
    screen = ladder_report.Screen(setup, prompts, silent=to_stdout(json_path))
    with ladder_report.progress() as progress:
        rows = run(setup, prompts, classes, progress=progress, shown=screen.row)
    ok = repaired(rows, prompts)
    results = lambda: ladder_report.as_json(rows, prompts, setup, ok)  # noqa: E731
    records.deliver_record(json_path, results, screen.end, rows, ok)
    return 0 if ok else DIFFERS


def check_classes(classes: tuple[str, ...]) -> None:
    """Raise UserError for a class that is unknown, or if all of them skip the first rung."""
    check_names(classes)
    if set(classes) <= set(LONG_RUNGS):
        raise UserError(f"prompts of {', '.join(classes)} tokens climb the last rungs only; name another class as well")


def check_names(classes: Sequence[str]) -> None:
    """Raise UserError for a class that is unknown."""
    for name in classes:
        if name not in CLASSES:
            raise UserError(f"prompt class {name!r} is not one of {', '.join(CLASSES)}")


def check_vocabulary(config: Config) -> None:
    """Raise UserError for a checkpoint that cannot know the words of the prompts."""
    if config.vocab_size != len(corpus.WORDS):
        raise UserError(
            f"the checkpoint has a vocabulary of {config.vocab_size}, the prompts one of {len(corpus.WORDS)}: name a "
            "checkpoint made by `dcp-fix train`"
        )


def load(checkpoint: Path, tp: int, dcp: int, stale: str, device: str) -> Setup:
    """Check the sizes and the device, then load the model onto it."""
    place = resolve_device(device)
    config = check_folder(Path(checkpoint))
    check_tp(config, tp)
    check_dcp(tp, dcp)
    model = Model.load(checkpoint, place, default_dtype(place))
    check_vocabulary(config)
    return Setup(model, tp, dcp, stale, device)
