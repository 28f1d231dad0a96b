"""The repair ladder: the same prompts at DCP1 and, with one defect fewer on every rung, at DCP4.

    unpatched          all four defects
    +query norm        every rank norms every query row                       vLLM issue 50095, PR 50005
    +combine routing   query gather and LSE combine under plain DCP           vLLM issue 50095, PR 50005
    +K rows            every rank materialises every new K row                vLLM issue 54907, PR 54908
    +workspace         split-KV accumulators only where something is split    vLLM issue 53413, PR 53755

Each rung and prompt class has engines of its own, so no rung sees memory that another one wrote. A rung that fails (the
historical workspace plan exceeds its budget on the long prompt) is a result like any other. What unwritten memory holds
is decided in scratch.py, so the garbage is the same on every run.

A rung is judged by equality of its tokens with DCP1's, then by right answers. The share of the commonest token is
reported but measures nothing: a better rung may repeat itself more.

It does not: time anything, or decide how the outputs look inside the model (notebooks do).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcp_fix import broken
from dcp_fix.base import equality
from dcp_fix.base.errors import DIFFERS, UserError
from dcp_fix.engine.checkpoint import check_folder
from dcp_fix.engine.config import Config
from dcp_fix.engine.engine import GIB, Engine, Generation, default_dtype, resolve_device
from dcp_fix.engine.model import Model
from dcp_fix.engine.shard import check_dcp, check_tp
from dcp_fix.engine.sharded import Ops
from dcp_fix.ladder.reference import check_reference
from dcp_fix.ranks.group import GroupError, LocalGroup
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
class Row:
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


def run(setup: Setup, prompts: int = 1, classes=CLASSES, rungs=None, progress: Callable | None = None) -> list[Row]:
    """Climb the ladder: first the DCP1 rows, one per class, then a row per rung and class, in that order.

    `progress(rung, prompt_class, done, total)` is called as rows of a prompt pass through layers.
    """
    asked = {name: corpus.prompts(name, prompts) for name in classes}
    reference = {name: generate(setup, REFERENCE, name, asked[name], progress)[0] for name in classes}
    for name, generations in reference.items():
        for number, generation in enumerate(generations):
            check_reference(f"{REFERENCE}, {name} tokens, prompt {number}", generation.logits)
    rows = [row(REFERENCE, name, asked[name], reference[name], reference[name]) for name in classes]
    for rung in rungs or RUNGS:
        for name in classes:
            if rung in LONG_RUNGS.get(name, RUNGS):
                generations, failure = generate(setup, rung, name, asked[name], progress)
                rows.append(row(rung, name, asked[name], generations, reference[name], failure))
    return rows


def generate(setup: Setup, rung: str, name: str, prompts, progress=None) -> tuple[list[Generation], str | None]:
    """One rung's (or DCP1's) answers to the prompts of a class, by fresh engines; or no answers and the reason."""

    def rank(group) -> list[Generation]:
        engine = make_engine(setup, rung, max(len(prompt.ids) for prompt in prompts), group)
        report = (lambda done, total: progress(rung, name, done, total)) if progress and group.rank == 0 else None
        return [answer(engine, prompt.ids, corpus.CACHED.get(name, 0), report) for prompt in prompts]

    try:
        return LocalGroup.run(setup.tp, rank, device=setup.device)[0], None
    except GroupError as error:
        if isinstance(error.__cause__, WorkspaceError):
            return [], f"workspace: {error.__cause__}"
        raise error.__cause__ or error from None


def make_engine(setup: Setup, rung: str, longest: int, group) -> Engine:
    """One rank's engine, its scratch memory left behind by another request."""
    dcp, ops = (1, Ops()) if rung == REFERENCE else (setup.dcp, RUNGS[rung])
    engine = Engine(
        setup.model, group, dcp_size=dcp, ops=ops, stale=setup.stale, workspace_budget=BUDGET,
        max_length=longest + NEW_TOKENS, device=setup.device,
    )  # fmt: skip
    if setup.stale == "previous":
        engine.leave_rows(corpus.prompts("512", 1, OTHER_SEED)[0].ids[:OTHER_TOKENS])
    return engine


def answer(engine: Engine, ids: list[int], cached: int, report=None) -> Generation:
    """One greedy answer; its first `cached` tokens, if any, go through the engine as a request of their own first."""
    if cached:
        engine.generate(ids[:cached], 1)
    return engine.generate(ids, NEW_TOKENS, report)


def row(rung: str, name: str, prompts, generations, reference, failure: str | None = None) -> Row:
    """Judge the generations of a rung against the corpus and against DCP1's."""
    if failure:
        return Row(rung, name, [], failure)
    judged = [judge(*three) for three in zip(prompts, generations, reference, strict=True)]
    return Row(rung, name, judged)


def judge(prompt, generation: Generation, reference: Generation) -> Answer:
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


def repaired(rows: list[Row], prompts: int) -> bool:
    """Whether the last rung equals DCP1 on every prompt of every class, and the first rung on none."""
    first = [row.equal for row in rows if row.rung == FIRST]
    last = [row.equal for row in rows if row.rung == LAST]
    return bool(first and last) and not any(first) and all(equal == prompts for equal in last)


def main(
    prompts: int = 1, stale: str = "previous", json_path: Path | None = None, tp: int = 4, dcp: int = 4,
    device: str = "cpu", checkpoint: Path | None = None, classes: tuple[str, ...] = CLASSES,
) -> int:  # fmt: skip
    """Run the whole ladder, write `json_path`, print; 0 if the fixes repair it and it was broken, else 1.

    Raises UserError for a damaged checkpoint, sizes that do not divide, a device that is not here, and for `classes`
    of which one is unknown or none climbs every rung.
    """
    from dcp_fix.ladder import report as ladder_report

    if dcp == 1:
        raise UserError("a DCP size of 1 is what the ladder compares with: choose another divisor of the TP size")
    check_classes(classes)
    setup = load(checkpoint or corpus.CHECKPOINT, tp, dcp, stale, device)
    with ladder_report.progress() as progress:
        rows = run(setup, prompts, classes, progress=progress)
    ok = repaired(rows, prompts)
    results = lambda: ladder_report.as_json(rows, prompts, setup, ok)  # noqa: E731
    records.deliver_record(json_path, results, ladder_report.show, rows, prompts, setup, ok)
    return 0 if ok else DIFFERS


def check_classes(classes: tuple[str, ...]) -> None:
    """Raise UserError for a class that is unknown, or if all of them skip the first rung."""
    check_names(classes)
    if set(classes) <= set(LONG_RUNGS):
        raise UserError(f"prompts of {', '.join(classes)} tokens climb the last rungs only; name another class as well")


def check_names(classes: tuple[str, ...]) -> None:
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
