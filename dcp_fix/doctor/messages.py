"""What a child process of the doctor says, line by line, taken as it is allowed to be or refused by its field.

    {"begin": probe, "case": text, "control": bool}            before anything that could hang or crash
    {"id": probe, "verdict": one of VERDICTS, "evidence": text}   for each probe that ended
    {"end": true}                                              last

The target's code runs in that process and may write to its pipe: a line that is no JSON object is nobody's.
"""

import json
from typing import Literal

from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.doctor.probes import PROBES, VERDICTS

EVIDENCE_LIMIT = 2000  # characters; the longest that a probe writes is 700
END = b'{"end": true}\n'
NONSENSE = "its child answered nonsense"
IDS = tuple(probe.id for probe in PROBES)
A_PROBE = f"one of {', '.join(IDS)}"


class Begin(Schema):
    """A case that is about to run. In a `control` the target is asked for what every vLLM can do."""

    begin: Literal[IDS] = allowed(A_PROBE)
    case: str = allowed("text")
    control: bool = allowed("true or false")


class Verdict(Schema):
    """A probe that ended."""

    id: Literal[IDS] = allowed(A_PROBE)
    verdict: Literal[VERDICTS] = allowed(f"one of {', '.join(VERDICTS)}")
    evidence: str = allowed("text")


def parse(text: bytes, asked: list[str]) -> tuple[dict[str, tuple[str, str]], Begin | None]:
    """({id: (verdict, evidence)} of the probes that were `asked` for, the last case that was begun).

    A line that would be a verdict and is none, or that no parser can hold, makes the running probe `not-run`.
    """
    said, last, nonsense = {}, None, {}
    for line in text.decode("utf-8", errors="replace").splitlines():
        try:
            message = taken(line, asked)
        except UserError as error:
            if last:
                nonsense[last.begin] = ("not-run", shown(str(error).split("\n")[0], EVIDENCE_LIMIT))
            continue
        if isinstance(message, Begin):
            last = message
        elif message:
            said[message.id] = (message.verdict, shown(message.evidence, EVIDENCE_LIMIT))
    return said | nonsense, last


def taken(line: str, asked: list[str]) -> Begin | Verdict | None:
    """One line; None for one that says nothing. Raises UserError for nonsense."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise UserError(f"{NONSENSE}: JSON nested too deeply") from None
    except ValueError:
        return None
    if not isinstance(message, dict):
        return None
    if "verdict" in message:
        found = checked(Verdict, message, NONSENSE)
        if found.id not in asked:
            raise UserError(f"{NONSENSE}: a verdict on {found.id}, which it was not asked for")
        return found
    if "begin" not in message:
        return None
    found = checked(Begin, message, NONSENSE)
    return found if found.begin in asked else None
