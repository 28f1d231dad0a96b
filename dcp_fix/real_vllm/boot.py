"""One boot of vLLM: the child process, the lines that it wrote, what its log says. Whatever vLLM does is a result.

    run("with the plugin", job, environment, folder, limit_s=600)

llm_child.py says what a job is. Its lines are read once it has ended, by the schemas here.
It does not: decide what is booted (rungs.py, pack_bench.py), or judge an answer (rows.py).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, model_validator

from dcp_fix.base.bounded import MIB, parse_json, read_bytes
from dcp_fix.base.errors import UserError
from dcp_fix.base.process import ending
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.real_vllm import boot_log

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]  # beyond it the difference of two may be no number
LARGEST = 256 * MIB  # of a file of lines; an answer takes about 2 kB


class Answered(Schema, extra="ignore"):
    """What vLLM answered, on a line of the child or in a record: a logprob for every token, null if it is no number."""

    tokens: list[Token] = allowed("a list of token ids")
    logprobs: list[Number | None] = allowed("a list of numbers and nulls, one for each token")
    smallest_margin: Number | None = allowed("a number, or null")
    cached: int = allowed("a number of tokens", ge=0)
    text: str | None = allowed("a text, or null")

    @model_validator(mode="after")
    def paired(self) -> "Answered":
        """Raises ValueError for a token without its logprob, or the reverse."""
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.logprobs)} logprobs; allowed: as many")
        return self


class Line(Schema):
    """What the child says: it has booted, has an answer to `id`, has timed `id`, or is done."""

    event: Literal["booted", "answer", "timed", "end"] = allowed("booted, answer, timed, end")
    id: str | None = allowed("a text", None)
    answer: Answered | None = allowed("an object", None)
    seconds: list[Number] = allowed("a list of seconds", [])
    vllm: str | None = allowed("a version", None)


@dataclass(frozen=True)
class Boot:
    """What a boot brought: answers and times by identity, why they are not all, what vLLM and its log say."""

    answers: dict[str, Answered] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    log: dict = field(default_factory=dict)
    vllm: str | None = None
    booted_s: float | None = None


def run(name: str, job: dict, environment: dict[str, str], folder: Path, limit_s: float) -> Boot:
    """Boot and work for `limit_s` seconds at most; job, lines and log stay in `folder`, and no process is left."""
    told, lines, log = (folder / f"{slug(name)}.{kind}" for kind in ("job.json", "lines.jsonl", "log"))
    told.write_text(json.dumps(job), encoding="utf-8")
    lines.touch()
    command = [sys.executable, "-P", "-m", "dcp_fix.real_vllm.llm_child", str(told), str(lines)]
    with open(log, "wb") as output:
        failure = how_it_ended(command, output, environment, limit_s)
    return read(lines, log, failure)


def how_it_ended(command: list[str], output: BinaryIO, environment: dict[str, str], limit_s: float) -> str | None:
    """Run a command that keeps itself on a leash (base/leash.py); None, or a sentence without its subject."""
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True,  # Ctrl-C reaches this process alone
    )  # fmt: skip
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:.0f} s"
    finally:
        child.stdin.close()  # the end of its lifeline
        child.wait()
    return ending(code) if code else None


def read(path: Path, log: Path, failure: str | None) -> Boot:
    """The lines of a boot, unless it failed, and its log. A file that is gone or damaged is a failure, too."""
    try:
        said = boot_log.read(log)
        lines = [] if failure else lines_in(path)
    except FileNotFoundError as error:
        return Boot(failure=f"{Path(error.filename).name} is gone")
    except UserError as error:
        return Boot(failure=str(error))
    cause = said.pop("error")
    if not failure and not any(line.event == "end" for line in lines):
        failure = "ended before its work was done"
    if failure:
        return Boot(failure=f"vLLM {failure}{': ' + cause if cause else ''} (see {log.name})", log=said)
    answers = {line.id: line.answer for line in lines if line.event == "answer"}
    times = {line.id: line.seconds for line in lines if line.event == "timed"}
    (booted,) = [line for line in lines if line.event == "booted"][:1] or [Line(event="booted")]
    return Boot(answers, times, None, said, booted.vllm, *booted.seconds[:1])


def lines_in(path: Path) -> list[Line]:
    """What the child said. Raises UserError that names file, line, field and what is allowed; FileNotFoundError."""
    lines = []
    for number, text in enumerate(read_bytes(path, LARGEST).splitlines(), 1):
        name = f"{path.name}, line {number}"
        line = checked(Line, parse_json(text, name), name)
        if line.event in ("answer", "timed") and line.id is None:
            raise UserError(f"{name}: lacks id; allowed: a text")
        if line.event == "answer" and line.answer is None:
            raise UserError(f"{name}: lacks answer; allowed: an object")
        lines.append(line)
    return lines


def slug(name: str) -> str:
    """A rung's name as that of a file."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def environment() -> dict[str, str]:
    """Ours, with this package importable wherever we were started."""
    package = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
