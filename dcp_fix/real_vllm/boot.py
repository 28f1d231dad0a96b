"""One boot of vLLM for one rung: the child process, what it answered, what its log says."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dcp_fix.base import supervise
from dcp_fix.real_vllm import boot_log
from dcp_fix.real_vllm.rungs import SWITCHED_OFF, Rung, Settings, arguments, child_environment, groups, sampling


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

    command = [sys.executable, "-P", "-m", "dcp_fix.real_vllm.llm_child", str(job), str(told)]
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
