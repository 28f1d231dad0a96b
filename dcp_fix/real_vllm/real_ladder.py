"""The repair ladder in real vLLM: the same prompts and verdict as ladder/ladder.py, the installed release as engine.

    dcp1               DCP1                 the reference: tensor parallelism alone
    installed          as installed         the release's own code, the plugin switched off
    workaround         forced MQA           as installed, with attention_config={"sparse_mla_force_mqa": true}
    query-norm+...     unpatched, ...       the plugin's repairs, then the named defects put back (put_back.py)
    plugin             with the plugin      the plugin's repairs

Every rung is one boot of vLLM's offline `LLM` in a child process of its own (llm_child.py), so no rung sees memory that
another one wrote. All of its prompts are asked in that boot: one by one, and with `one_batch` all together once more.
Memory that a broken kernel leaves unwritten holds whatever vLLM's allocator has there, so garbage differs from run to
run. After every rung the record is written and its rows are printed; a later run takes rungs over with `resume`.

It does not: time anything but the boot, or choose options that a model of another size needs (`--llm`).
"""

import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dcp_fix.base import equality, output
from dcp_fix.base.errors import DIFFERS, UserError, shown
from dcp_fix.base.process import printed, status_of, stoppable
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.engine.checkpoint import check_folder
from dcp_fix.ladder import ladder
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import boot, boot_log, preflight, questions, report, rungs
from dcp_fix.real_vllm.boot import Answered, Boot
from dcp_fix.real_vllm.rows import RungRow, reference_of, rows_of
from dcp_fix.real_vllm.rungs import REFERENCE, Rung, Settings
from dcp_fix.records import machine, records
from dcp_fix.records.fingerprints import checkpoint_terms, code_terms


def from_options(json_path: Path | None, resume: Path | None, **given) -> int:
    """`main` with the words of the command line; what was not given keeps its default. UserError for a bad word."""
    words = {name: value for name, value in given.items() if value is not None}
    for name in ("classes", "rungs"):
        if name in words:
            words[name] = listed(name, words[name])
    try:
        words["put_back"] = put_back.parse(words.get("put_back", ""))
    except ValueError as error:
        raise UserError(f"--put-back: {shown(error)}") from None
    words["llm"] = rungs.llm_arguments(words.get("llm", ()))
    return main(Settings(**words), json_path, resume)


def listed(name: str, text: str) -> tuple[str, ...]:
    """Words separated by commas. Raises UserError where there is none, or one comes twice."""
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words or len(set(words)) < len(words):
        raise UserError(f"--{name} {shown(text)!r}: allowed: names separated by commas, each of them once")
    return words


def main(settings: Settings, json_path: Path | None = None, resume: Path | None = None) -> int:
    """Climb, record and print after every rung; 0 if all answers of the last rung are DCP1's, else 1.

    Raises UserError for what preflight.py refuses, unknown names, and a record that cannot be resumed.
    """
    wanted = climbable(settings)
    vllm = preflight.check(settings.tp * settings.pcp, any(rung.plugin for rung in wanted))
    run = RealLadder(settings, vllm, asked_of(settings), wanted)
    if resume:
        run.take_over(resume)
    if REFERENCE not in [rung.name for rung in wanted]:
        reference_of(run.rows)
    folder = Path(tempfile.mkdtemp(prefix="dcp-fix-vllm-", dir=settings.logs))  # a new one: nothing of the user's
    try:
        with stoppable():
            run.climb(folder, json_path)
    except KeyboardInterrupt as stop:
        print(f"interrupted: vLLM is stopped, its logs are in {folder}", file=sys.stderr)
        return status_of(stop)
    return 0 if run.ok else DIFFERS


def climbable(settings: Settings) -> list[Rung]:
    """The rungs. Raises UserError for settings that cannot be climbed, before anything is done."""
    if settings.dcp < 2:
        raise UserError("--dcp 1 is what the ladder compares with: choose another divisor of --tp")
    ladder.check_names(settings.classes)
    if not settings.model:
        ladder.check_vocabulary(check_folder(settings.checkpoint))
    if settings.logs:
        output.check_folder(settings.logs)
        settings.logs.mkdir(parents=True, exist_ok=True)
    return rungs.climb(settings)


def asked_of(settings: Settings) -> list[questions.Question]:
    """The questions of a run."""
    if settings.model:
        return questions.of_model(settings.model, settings.classes, settings.prompts)
    return questions.of_corpus(settings.classes, settings.prompts)


@dataclass
class RealLadder:
    """One run: the rows so far, and a dict per boot as the record holds it."""

    settings: Settings
    vllm: str
    asked: list[questions.Question]
    wanted: list[Rung]
    rows: list[RungRow] = field(default_factory=list)
    boots: dict[str, dict] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """The exit status, as a truth: whether all answers of the last rung are DCP1's."""
        return all(row.whole for row in self.rows if row.rung == self.wanted[-1].name)

    @property
    def terms(self) -> dict:
        """What two runs must share for the rungs of one to stand beside those of the other."""
        one = asdict(replace(self.settings, logs=None))
        kept = ("tp", "dcp", "pcp", "model", "prompts", "one_batch", "cuda_graphs", "llm")
        if not self.settings.model:
            one["model"] = checkpoint_terms(self.settings.checkpoint)
        ids = [token for question in self.asked for token in (question.cached, *question.ids)]
        return {name: one[name] for name in kept} | code_terms() | {
            "classes": list(self.settings.classes), "asked": equality.digest(ids), "vllm": self.vllm,
            "gpus": machine.hardware()["gpus"],
        }  # fmt: skip

    def climb(self, folder: Path, json_path: Path | None) -> None:
        """Boot every rung that was not taken over; the record first, then what is printed."""
        alone = output.to_stdout(json_path)  # standard output holds the record, once
        show = (lambda *_: None) if alone else printed
        show(report.show_title, self.settings, self.vllm)
        show(report.show_rows, self.rows)
        for rung in self.wanted:
            rows = [] if rung.name in self.boots else self.add(rung, folder)
            if json_path and (rung is self.wanted[-1] or not alone):
                records.record(json_path, machine.command_line(), report.as_json(self))
            show(report.show_rows, rows)
        show(report.show_verdict, self)

    def add(self, rung: Rung, folder: Path) -> list[RungRow]:
        """Boot a rung and take its rows in."""
        reference = {} if rung.name == REFERENCE else reference_of(self.rows)
        job, environment = rungs.job(self.settings, rung, self.asked), rungs.child_environment(self.settings, rung)
        with report.booting(rung.name, folder / f"{boot.slug(rung.name)}.log"):
            result = boot.run(rung.name, job, environment, folder, self.settings.timeout)
        if not result.failure:
            ranks = self.settings.tp * rung.llm.get("prefill_context_parallel_size", 1)
            result = replace(result, failure=boot_log.not_as_asked(result.log, rung.plugin, rung.put_back, ranks))
        rows = rows_of(rung.name, self.settings, self.asked, result, reference)
        self.rows += rows
        self.boots[rung.name] = {
            "llm": job["llm"] | {"model": Path(job["llm"]["model"]).name}, "environment": rung.environment,
            "put_back": list(rung.put_back), "seconds": result.booted_s, "vllm": result.vllm, "log": result.log,
        }  # fmt: skip
        return rows

    def take_over(self, path: Path) -> None:
        """The rungs of an earlier record that have answers. Raises UserError if they are not this run's to use."""
        recorded = records.load_record(path)["results"]
        earlier = checked(Resumed, recorded, shown(path))
        different = [name for name, value in self.terms.items() if earlier.terms.get(name) != value]
        if different:
            said = "; ".join(
                f"{name} {earlier.terms.get(name)!r} there, {self.terms[name]!r} here" for name in different
            )
            raise UserError(f"{shown(path)} cannot be resumed, it differs in {shown(said, 1000)}")
        usable = {row.rung for row in earlier.rows} & set(earlier.boots) - {r.rung for r in earlier.rows if r.failure}
        try:
            for rung in sorted(usable, key=lambda rung: rung != REFERENCE):
                self.judge_again(rung, [row for row in earlier.rows if row.rung == rung])
                self.boots[rung] = earlier.boots[rung]
        except UserError as error:
            raise UserError(f"{shown(path)} cannot be resumed: {error}") from None
        told, again = [row for row in recorded["rows"] if row["rung"] in usable], map(report.row_json, self.rows)
        if sorted(told, key=str) != sorted(again, key=str):
            raise UserError(f"{shown(path)} cannot be resumed: its answers, judged again, come out otherwise")

    def judge_again(self, rung: str, rows: list["RecordedRow"]) -> None:
        """Take recorded answers in as if they had just come; the corpus's words follow from the tokens."""
        answers = {}
        for row in rows:
            of_class = [question for question in self.asked if question.prompt_class == row.prompt_class]
            for question, answer in zip(of_class, row.answers, strict=False):
                text = answer.text if self.settings.model else None
                answers[question.identity(row.batch)] = answer.model_copy(update={"text": text})
        reference = {} if rung == REFERENCE else reference_of(self.rows)
        self.rows += rows_of(rung, self.settings, self.asked, Boot(answers), reference)


class RecordedRow(Schema, extra="ignore"):
    """What is read again of a row of a record."""

    rung: str = allowed("a rung's name")
    prompt_class: str = allowed("a prompt class")
    batch: bool = allowed("true or false")
    failure: str | None = allowed("a sentence, or null")
    answers: list[Answered] = allowed("a list of answers")


class Resumed(Schema, extra="ignore"):
    """What is read again of the results of a ladder in real vLLM; it is judged again, so the rest follows from it."""

    terms: dict[str, Any] = allowed("an object, as a ladder in real vLLM has it")
    boots: dict[str, dict[str, Any]] = allowed("an object, a boot for each rung")
    rows: list[RecordedRow] = allowed("a list of rows")
