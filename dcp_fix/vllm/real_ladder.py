"""The repair ladder in real vLLM: the same prompts and verdict as evidence/ladder.py, the installed release as engine.

    dcp1               DCP1                 the reference: tensor parallelism alone
    installed          as installed         the release's own code, the plugin switched off
    workaround         forced MQA           as installed, with attention_config={"sparse_mla_force_mqa": true}
    query-norm+...     unpatched, ...       the plugin's repairs, then the named defects put back (put_back.py)
    plugin             with the plugin      the plugin's repairs

Every rung is one boot of vLLM's offline `LLM` in a child process of its own (llm_child.py), so no rung sees memory that
another one wrote. All of its prompts are asked in that boot: one by one, and with `one_batch` all together once more.
Memory that a broken kernel leaves unwritten holds whatever vLLM's allocator has there, so garbage differs from run to
run. After every rung the record is written; a later run takes its rungs over with `resume`.

Here a rung before the last counts as broken if one answer differs from DCP1's: long prompts take another path.

It does not: time anything but the boot, or choose options that a model of another size needs (`--llm`).
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dcp_fix import equality
from dcp_fix.errors import UserError
from dcp_fix.evidence import ladder, machine, records
from dcp_fix.evidence.terms import checkpoint_terms
from dcp_fix.process import printed, status_of, stoppable
from dcp_fix.tiny import corpus
from dcp_fix.vllm import boot_log, preflight, put_back, questions, supervise

REFERENCE, INSTALLED, WORKAROUND, PLUGIN = "DCP1", "as installed", "forced MQA", "with the plugin"
NAMED = {"dcp1": REFERENCE, "installed": INSTALLED, "workaround": WORKAROUND, "plugin": PLUGIN}
CLIMBED = ("unpatched", "+query norm", "+combine routing")  # all three put back, then one fewer each time
FORCE_MQA = {"sparse_mla_force_mqa": True}
TOGETHER = 64  # requests that vLLM runs at once in one batch
BLOCK = 64  # tokens of a cache block of fp8_ds_mla
SWITCHED_OFF = {"DCP_FIX_PLUGIN": "0"}
# vLLM's settings that the rungs rely on, and those that a host without network needs.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CONFIGURE_LOGGING": "1", "PYTHONUNBUFFERED": "1"}
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(frozen=True)
class Settings:
    """One run of the command. Without `model` the checkpoint folder is served, with the corpus's own token ids."""

    tp: int = 2
    dcp: int = 2
    pcp: int = 1
    model: str | None = None
    checkpoint: Path = corpus.CHECKPOINT
    prompts: int = 1
    classes: tuple[str, ...] = ("512", "1536", "1024+1536")
    put_back: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    one_batch: bool = False
    cuda_graphs: bool = False
    llm: dict = field(default_factory=dict)
    timeout: float = 600.0
    logs: Path | None = None


@dataclass(frozen=True)
class Rung:
    """One boot: its name, the defects put back, arguments of `LLM` of its own, environment of its own."""

    name: str
    put_back: tuple[str, ...] = ()
    llm: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Answer(ladder.Answer):
    """Also: logprobs of the tokens (None: no number), how many are none, the largest difference from DCP1's.

    The difference is over the leading tokens that are the same, None where there is nothing to compare.
    """

    logprobs: list[float | None]
    nan: int
    logprob_difference: float | None


@dataclass(frozen=True)
class Row(ladder.Row):
    """One rung, class and way of asking."""

    batch: bool = False

    @property
    def nan(self) -> int:
        """Prompts with a token whose logprob is no number."""
        return sum(answer.nan > 0 for answer in self.answers)

    @property
    def logprob_difference(self) -> float | None:
        """The largest of its answers, None where none has any."""
        return max((a.logprob_difference for a in self.answers if a.logprob_difference is not None), default=None)


# --- rungs ------------------------------------------------------------------------------------------------------------


def climb(settings: Settings) -> list[Rung]:
    """The rungs that the settings ask for, DCP1 first. Raises UserError for one that is unknown."""
    names = settings.rungs or ("dcp1", "installed", *backs(settings.put_back), "plugin")
    return [rung(name, settings) for name in names]


def backs(defects: tuple[str, ...]) -> list[str]:
    """All of the defects, then without the first, and so on: each as the name of a rung."""
    return ["+".join(defects[i:]) for i in range(len(defects))]


def rung(name: str, settings: Settings) -> Rung:
    """A rung by the name that `--rungs` takes."""
    parallel = {"tensor_parallel_size": settings.tp}
    if name == "dcp1":
        return Rung(REFERENCE, llm=parallel, environment=SWITCHED_OFF)
    if settings.pcp > 1:
        parallel |= {"prefill_context_parallel_size": settings.pcp}
    if settings.dcp > 1:
        parallel |= {"decode_context_parallel_size": settings.dcp, "dcp_comm_backend": "ag_rs"}
    if name == "installed":
        return Rung(INSTALLED, llm=parallel, environment=SWITCHED_OFF)
    if name == "workaround":
        attention = {**settings.llm.get("attention_config", {}), **FORCE_MQA}
        return Rung(WORKAROUND, llm=parallel | {"attention_config": attention}, environment=SWITCHED_OFF)
    if name == "plugin":
        return Rung(PLUGIN, llm=parallel)
    defects = defects_of(name)
    return Rung(back_name(defects), defects, parallel, {put_back.VARIABLE: ",".join(defects)})


def defects_of(name: str) -> tuple[str, ...]:
    """`query-norm+k-rows` as defects. Raises UserError for any other word."""
    try:
        defects = put_back.parse(name)
    except ValueError:
        defects = ()
    if not defects:
        known = ", ".join(NAMED)
        raise UserError(f"--rungs: {name!r} is none of {known}, nor defects joined by + such as query-norm+k-rows")
    return defects


def back_name(defects: tuple[str, ...]) -> str:
    """The rung's name in the table: that of today's ladder where the defects are history, else their names."""
    if defects == put_back.HISTORY[-len(defects) :]:
        return CLIMBED[len(put_back.HISTORY) - len(defects)]
    return f"put back: {', '.join(defects)}"


# --- what vLLM is told ------------------------------------------------------------------------------------------------


def arguments(settings: Settings, rung: Rung, asked: list[questions.Question]) -> dict:
    """Arguments of `LLM`: what was measured to work, the rung's own, the user's last."""
    ours = {
        "model": settings.model or str(settings.checkpoint),
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": BLOCK,
        "enforce_eager": not settings.cuda_graphs,
        "max_model_len": -(-(max(len(q.ids) for q in asked) + ladder.NEW_TOKENS) // BLOCK) * BLOCK,
        "max_num_seqs": min(len(asked), TOGETHER) if settings.one_batch else 4,
        "enable_prefix_caching": True,
    }
    if not settings.model:
        ours |= {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
    return ours | settings.llm | rung.llm


def sampling(settings: Settings) -> dict:
    """Arguments of `SamplingParams`: greedy, with the margin to the second best token."""
    greedy = {"temperature": 0.0, "max_tokens": ladder.NEW_TOKENS, "logprobs": 2}
    if settings.model:
        return greedy
    ends = json.loads((settings.checkpoint / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    return greedy | {"detokenize": False, "stop_token_ids": ends if isinstance(ends, list) else [ends]}


def groups(settings: Settings, asked: list[questions.Question]) -> list[list[dict]]:
    """Requests that are sent together: each alone, then all at once if asked."""
    alone = [[request(question, batch=False)] for question in asked]
    return alone + [[request(question, batch=True) for question in asked]] * settings.one_batch


def request(question: questions.Question, batch: bool) -> dict:
    """What llm_child.py takes for one question."""
    return {"id": identity(question, batch), "ids": question.ids, "cached": question.cached}


def identity(question: questions.Question, batch: bool) -> str:
    """Names an answer in the file of answers."""
    return f"{'batch' if batch else 'alone'} {question.prompt_class} {question.number}"


def child_environment(settings: Settings, rung: Rung) -> dict[str, str]:
    """The caller's environment, with what the rung is about and nothing left over from another one."""
    inherited = {k: v for k, v in preflight.environment().items() if k not in ("DCP_FIX_PLUGIN", put_back.VARIABLE)}
    offline = {"HF_HUB_OFFLINE": "1"} if not settings.model or Path(settings.model).is_dir() else {}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if rung.llm.get("prefill_context_parallel_size", 1) > 1 else {}
    return DEFAULTS | offline | runner | inherited | ENVIRONMENT | rung.environment


# --- one boot ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boot:
    """What a boot brought: answers by identity, the release that answered, why it is not all, what its log says."""

    answers: dict[str, dict]
    vllm: str | None = None
    seconds: float | None = None
    failure: str | None = None
    log: dict = field(default_factory=dict)


def boot(settings: Settings, rung: Rung, asked, folder: Path, progress: Callable) -> Boot:
    """Boot vLLM as a rung wants it and ask everything. Whatever vLLM does is a result; no process is left behind.

    `progress(event)` is called with each line of answers, and with None while there is nothing new.
    """
    job, told, log = (folder / f"{slug(rung.name)}.{kind}" for kind in ("job.json", "answers.jsonl", "log"))
    task = {"llm": arguments(settings, rung, asked), "sampling": sampling(settings), "groups": groups(settings, asked)}
    job.write_text(json.dumps(task), encoding="utf-8")
    told.write_text("", encoding="utf-8")
    log.write_bytes(b"")
    events = []

    def seen(event):
        if event is not None:
            events.append(event)
        progress(event)

    command = [sys.executable, "-P", "-m", "dcp_fix.vllm.llm_child", str(job), str(told)]
    with supervise.running(command, log, child_environment(settings, rung)) as child:
        failure = supervise.follow(child, told, settings.timeout, seen)
    return read(events, rung, log, failure)


def read(events: list[dict], rung: Rung, log: Path, failure: str | None) -> Boot:
    """The events of a boot and its log."""
    said = boot_log.read(log)
    error = said.pop("error")
    booted = next((event for event in events if event["event"] == "booted"), {})
    if failure:
        failure = f"vLLM {failure}{': ' + error if error else ''} (see {log.name})"
    else:
        failure = boot_log.not_as_asked(said, plugin=rung.environment != SWITCHED_OFF, put_back=rung.put_back)
    answers = {event["id"]: event for event in events if event["event"] == "answer"}
    return Boot(answers, booted.get("vllm"), booted.get("seconds"), failure, said)


def slug(name: str) -> str:
    """A rung's name as that of a file."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(name: str, settings: Settings, asked, result: Boot, reference: dict[tuple, list[Answer]]) -> list[Row]:
    """A row per class and way of asking; `reference`: DCP1's answers by class and way, empty for DCP1 itself."""
    rows = []
    for batch in (False, True)[: 1 + settings.one_batch]:
        for prompt_class in settings.classes:
            of_class = [question for question in asked if question.prompt_class == prompt_class]
            found = [result.answers.get(identity(question, batch)) for question in of_class]
            failure = result.failure or (None if all(found) else "vLLM left prompts unanswered")
            known = reference.get((prompt_class, batch), [None] * len(of_class))
            judged = [judge(*three) for three in zip(of_class, found, known, strict=True) if three[1]]
            rows.append(Row(name, prompt_class, [] if failure else judged, failure, batch))
    return rows


def judge(question: questions.Question, found: dict, reference: Answer | None) -> Answer:
    """One answer against the right one and DCP1's; without a reference it is its own."""
    tokens, logprobs = found["tokens"], [None if x is None else round(x, 7) for x in found["logprobs"]]
    text = found["text"] or corpus.decode(tokens)
    theirs = reference.tokens if reference else tokens
    margins = [margin for margin in found["margins"] if margin is not None]
    return Answer(
        text=text,
        tokens=tokens,
        sha256=equality.digest(tokens),
        cached=found["cached"],
        right=question.right(tokens, text),
        first_difference=equality.first_difference(tokens, theirs),
        commonest_share=Counter(tokens).most_common(1)[0][1] / len(tokens) if tokens else 0.0,
        smallest_margin=round(min(margins), 6) if margins else None,
        logprobs=logprobs,
        nan=logprobs.count(None),
        logprob_difference=largest(tokens, logprobs, reference) if reference else 0.0,
    )


def largest(tokens: list[int], logprobs: list[float | None], reference: Answer) -> float | None:
    """The largest difference over the leading tokens that both have, as far as both logprobs are numbers."""
    same = equality.first_difference(tokens, reference.tokens)
    pairs = list(zip(logprobs, reference.logprobs, strict=False))[:same]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def reference_of(rows: list[Row]) -> dict[tuple, list[Answer]]:
    """DCP1's answers by class and way of asking. Raises UserError if it has none, since nothing can be judged then."""
    own = [row for row in rows if row.rung == REFERENCE]
    failed = next((row.failure for row in own if row.failure), None if own else "it was not run")
    if failed:
        raise UserError(f"there is no reference, DCP1 has no answers: {failed}")
    return {(row.prompt_class, row.batch): row.answers for row in own}


# --- the verdict ------------------------------------------------------------------------------------------------------


def repaired(rows: list[Row], prompts: int) -> bool:
    """Whether the plugin's rung equals DCP1 on every prompt, asked either way, and some rung without it does not."""
    last = [row for row in rows if row.rung == PLUGIN]
    return bool(last) and all(whole(row, prompts) for row in last) and bool(broken(rows, prompts))


def broken(rows: list[Row], prompts: int) -> list[str]:
    """Rungs as installed or with a defect put back that differ from DCP1 somewhere, or have no answer."""
    healthy = (REFERENCE, WORKAROUND, PLUGIN)
    return list(dict.fromkeys(row.rung for row in rows if row.rung not in healthy and not whole(row, prompts)))


def whole(row: Row, prompts: int) -> bool:
    """Whether all of a row's answers are DCP1's."""
    return not row.failure and row.equal == prompts


# --- the command ------------------------------------------------------------------------------------------------------


def from_options(json_path: Path | None, resume: Path | None, **given) -> int:
    """`main` with the words of the command line; what was not given keeps its default. UserError for a bad word."""
    words = {name: value for name, value in given.items() if value is not None}
    for name in ("classes", "rungs"):
        if name in words:
            words[name] = tuple(word.strip() for word in words[name].split(",") if word.strip())
    try:
        words["put_back"] = put_back.parse(words.get("put_back", ""))
    except ValueError as error:
        raise UserError(f"--put-back: {error}") from None
    words["llm"] = dict(pair(word) for word in words.get("llm", ()))
    return main(Settings(**words), json_path, resume)


def pair(word: str) -> tuple[str, object]:
    """`key=value` of an argument of `LLM`: the value as JSON, or as text where it is none."""
    key, equals, value = word.partition("=")
    if not equals or not key.replace("-", "_").isidentifier():
        raise UserError(
            f'--llm {word!r}: write key=value, such as max_num_seqs=8 or attention_config=\'{{"backend": "X"}}\''
        )
    try:
        return key.replace("-", "_"), json.loads(value)
    except ValueError:
        return key.replace("-", "_"), value


def main(settings: Settings, json_path: Path | None = None, resume: Path | None = None) -> int:
    """Climb, print, record after every rung; 0 if something was broken and the plugin repairs it, else 1.

    Raises UserError for what preflight.py refuses, unknown names, and a record that cannot be resumed.
    """
    from dcp_fix.vllm import real_ladder_report as report

    ladder.check_names(settings.classes)
    wanted = climb(settings)
    found = preflight.check(serve_args(settings), settings.tp * settings.pcp, any(needs_plugin(r) for r in wanted))
    asked = ask(settings)
    terms = terms_of(settings, asked, found["vllm"])
    climbed = Climbed(settings, found, terms, *(taken_over(resume, terms) if resume else ([], {})))
    if REFERENCE not in [rung.name for rung in wanted]:
        reference_of(climbed.rows)
    folder = logs_folder(settings, json_path)
    try:
        with stoppable():
            for rung in wanted:
                if rung.name not in climbed.boots:
                    climbed.add(rung, asked, folder, report)
                if json_path:
                    records.record(json_path, machine.command_line(), report.as_json(climbed))
    except KeyboardInterrupt as stop:
        print(f"interrupted: vLLM is stopped, its logs are in {folder}", file=sys.stderr)
        return status_of(stop)
    printed(report.show, climbed)
    return 0 if climbed.ok else 1


@dataclass
class Climbed:
    """Everything so far. `found`: what preflight.check returns; `boots`: a dict per rung, as the record holds it."""

    settings: Settings
    found: dict
    terms: dict
    rows: list[Row]
    boots: dict[str, dict]

    @property
    def ok(self) -> bool:
        """The exit status, as a truth."""
        return repaired(self.rows, self.settings.prompts)

    def add(self, rung: Rung, asked, folder: Path, report) -> None:
        """Boot a rung and take its rows in."""
        reference = {} if rung.name == REFERENCE else reference_of(self.rows)
        total = len(asked) * (1 + self.settings.one_batch)
        with report.progress(rung.name, total, folder / f"{slug(rung.name)}.log") as progress:
            result = boot(self.settings, rung, asked, folder, progress)
        self.rows += rows_of(rung.name, self.settings, asked, result, reference)
        told = arguments(self.settings, rung, asked)
        told["model"] = Path(told["model"]).name if Path(told["model"]).is_absolute() else told["model"]
        self.boots[rung.name] = {
            "llm": told, "environment": rung.environment, "put_back": list(rung.put_back), "seconds": result.seconds,
            "vllm": result.vllm, "log": result.log,
        }  # fmt: skip


def needs_plugin(rung: Rung) -> bool:
    """Whether the plugin has to be loaded for a rung to be what its name says."""
    return rung.environment != SWITCHED_OFF


def serve_args(settings: Settings) -> str:
    """The largest rung as arguments of `vllm serve`, for the doctor's rules."""
    import shlex

    told = {"kv_cache_dtype": "fp8_ds_mla", "dcp_comm_backend": "ag_rs"} | settings.llm
    words = ["--model", settings.model or str(settings.checkpoint), "--tensor-parallel-size", str(settings.tp)]
    words += ["-dcp", str(settings.dcp), "-pcp", str(settings.pcp), "--kv-cache-dtype", str(told["kv_cache_dtype"])]
    words += ["--dcp-comm-backend", str(told["dcp_comm_backend"])]
    if told.get("attention_backend"):
        words += ["--attention-backend", str(told["attention_backend"])]
    return shlex.join(words)


def ask(settings: Settings) -> list[questions.Question]:
    """The questions of a run."""
    if settings.model:
        return questions.of_model(settings.model, settings.classes, settings.prompts)
    return questions.of_corpus(settings.classes, settings.prompts)


def terms_of(settings: Settings, asked, vllm: str) -> dict:
    """What two runs must share for the rungs of one to stand beside those of the other."""
    one = asdict(replace(settings, logs=None))
    kept = ("tp", "dcp", "pcp", "model", "prompts", "one_batch", "cuda_graphs", "llm")
    if not settings.model:
        one["model"] = checkpoint_terms(settings.checkpoint)
    ids = [token for question in asked for token in (question.cached, *question.ids)]
    return {name: one[name] for name in kept} | {
        "classes": list(settings.classes), "asked": equality.digest(ids), "vllm": vllm,
    }  # fmt: skip


def taken_over(path: Path, terms: dict) -> tuple[list[Row], dict]:
    """(rows, boots) of an earlier record: of its rungs that have answers. Raises UserError if its terms differ."""
    results = records.load_record(path)["results"]
    if "boots" not in results:
        raise UserError(f"{path}: no record of `dcp-fix reproduce --engine vllm`, which alone can be resumed")
    different = [name for name, value in terms.items() if results["terms"].get(name) != value]
    if different:
        said = "; ".join(f"{name} {results['terms'].get(name)!r} there, {terms[name]!r} here" for name in different)
        raise UserError(f"{path} cannot be resumed, it differs in {said}")
    failed = {row["rung"] for row in results["rows"] if row["failure"]}
    rows = [row_from(row) for row in results["rows"] if row["rung"] not in failed]
    return rows, {name: boot for name, boot in results["boots"].items() if name not in failed}


def row_from(row: dict) -> Row:
    """A row as real_ladder_report.as_json wrote it."""
    answers = [Answer(**answer) for answer in row["answers"]]
    return Row(row["rung"], row["prompt_class"], answers, row["failure"], row["batch"])


def logs_folder(settings: Settings, json_path: Path | None) -> Path:
    """Where jobs, answers and logs go: as asked, else beside the record, else into a temporary folder that stays."""
    folder = settings.logs or (json_path and json_path.with_name(f"{json_path.stem}-logs"))
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="dcp-fix-vllm-"))
    os.makedirs(folder, exist_ok=True)
    return folder
