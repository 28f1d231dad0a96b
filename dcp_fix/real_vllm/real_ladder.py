"""The repair ladder in real vLLM: the same prompts and verdict as ladder/ladder.py, the installed release as engine.

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

rungs.py says what each rung boots, boot.py boots it, rows.py judges what came out.
It does not: time anything but the boot, or choose options that a model of another size needs (`--llm`).
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.base.process import printed, status_of, stoppable
from dcp_fix.ladder import ladder
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import preflight, questions
from dcp_fix.real_vllm.boot import boot, slug
from dcp_fix.real_vllm.rows import Row, reference_of, repaired, row_from, rows_of
from dcp_fix.real_vllm.rungs import REFERENCE, Rung, Settings, arguments, climb, needs_plugin, serve_args
from dcp_fix.records import machine, records
from dcp_fix.records.fingerprints import checkpoint_terms


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
    from dcp_fix.real_vllm import report

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


def logs_folder(settings: Settings, json_path: Path | None) -> Path:
    """Where jobs, answers and logs go: as asked, else beside the record, else into a temporary folder that stays."""
    folder = settings.logs or (json_path and json_path.with_name(f"{json_path.stem}-logs"))
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="dcp-fix-vllm-"))
    os.makedirs(folder, exist_ok=True)
    return folder
