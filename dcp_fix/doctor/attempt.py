"""How a probe calls code that it does not trust to return."""

from dataclasses import dataclass
from typing import Any

from dcp_fix.doctor.stand_ins import StandInReached


class NotRun(Exception):
    """The probe cannot say: the message is the evidence of a `not-run` verdict."""


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or what it raised."""

    value: Any = None
    raised: Exception | None = None


def attempt(call) -> Outcome:
    """What the target's code returned or raised. StandInReached becomes NotRun: the lack is ours, not the target's."""
    try:
        return Outcome(value=call())
    except NotRun:
        raise
    except StandInReached as reached:
        raise NotRun(f"the target uses {reached}, for which this probe has no stand-in") from reached
    except Exception as error:  # noqa: BLE001 the target's code may raise anything, and what it raises is the finding
        return Outcome(raised=error)


def one_line(error: BaseException) -> str:
    """`TypeError: message`, of the innermost cause, on one line of at most 200 characters and without addresses."""
    seen = set()
    while error.__cause__ is not None and error not in seen:  # causes may form a circle
        seen.add(error)
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def judged(found: list[str], good: str) -> tuple[str, str]:
    """(verdict, evidence): at most three of the sentences that were found, and how many more there are."""
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return ("defect", "; ".join(found[:3]) + more) if found else ("ok", good)
