"""From what a user sees to the probe that can tell, or to a cause that is none of these defects.

A few questions, each of which parts the causes that are left; the answer "unknown" is always allowed. The tree is data:

    Ask("looks", {...})        a question, and where each answer leads
    End(probes, because)       the end: which probes look at it, why they do, and what else it may be

Sources: the symptoms of vLLM issues 50095, 53413, 54300, 54305, 54907 and 50781, and runs on two H200s.

Not here: proof. An end names what fits, a probe says whether this vLLM has it.
"""

import json
from dataclasses import dataclass

from dcp_fix.base.errors import UserError, shown
from dcp_fix.doctor.probes import FORCE_MQA

QUESTIONS = {
    "looks": (
        "What do you see?",
        {
            "repeated": "one token or phrase over and over",
            "nan": "NaN logprobs, or an error about them",
            "fluent": "fluent text that is wrong",
            "crash": "an error, or out of memory, while it serves",
            "refused": "the server does not start",
        },
    ),
    "dcp1": ("Is the same prompt wrong with --decode-context-parallel-size 1, all else equal?", {"yes": "", "no": ""}),
    "load": ("Is it wrong only while other requests are served?", {"yes": "", "no": ""}),
    "cache": ("Is it wrong only when part of the prompt is in the prefix cache?", {"yes": "", "no": ""}),
    "nccl": ("Does the server's log say 'vLLM is using nccl=='?", {"yes": "", "no": ""}),
    "flag": (f"Does {FORCE_MQA} cure it?", {"yes": "", "no": ""}),
    "length": (
        "Which prompts are wrong?",
        {
            "short": "up to the model's index_topk (2048) tokens only",
            "long": "longer ones only",
            "any": "both",
        },
    ),
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class End:
    """`probes`: ids, empty where no probe looks at this cause. `other`: what to try where the probes find nothing."""

    probes: tuple[str, ...]
    because: str
    other: str = ""


@dataclass(frozen=True)
class Ask:
    """`leads`: {answer: Ask or End}; an answer that is not there leads where UNKNOWN leads."""

    question: str
    leads: dict


UNROUTED = End(
    ("query-rows", "combine-routing", "silent-collective"),
    "every prompt is wrong under DCP alone: the query of other ranks' tokens is not normed, partial outputs are not "
    "combined, or the sum over ranks is never made",
    "dcp-fix compare with a DCP1 server says from which token on",
)
DENSE = End(
    ("k-rows", "owner-only-writes"),
    "prompts that take the dense prefill read K rows that only their owner wrote; the option avoids that path",
)
LENGTH = Ask("length", {"short": DENSE, UNKNOWN: UNROUTED})
SHORT_BUT_NOT_DENSE = Ask(
    "length",
    {
        "long": End(
            ("combine-routing", "empty-rows"), "long prompts take the sparse path, whose partials are combined"
        ),
        UNKNOWN: UNROUTED,
    },
)
UNDER_DCP = Ask(
    "nccl",
    {
        "no": End(
            ("silent-collective",),
            "the wrapper around NCCL is disabled, and reduce-scatter returns memory that nobody wrote",
        ),
        UNKNOWN: Ask("flag", {"yes": DENSE, "no": SHORT_BUT_NOT_DENSE, UNKNOWN: LENGTH}),
    },
)
CACHED = End(
    (),
    "no probe looks at cached context: its rows are gathered from their owners, chunk by chunk",
    "dcp-fix compare against a DCP1 server: its class 1024+1536 has a cached part, the others have none",
)
LOADED = End(
    ("empty-rows", "direct-a2a-layout"),
    "only batches are wrong: ranks without a key for a short request take part in them",
    "a batch alone changes last digits and, rarely, a token, at DCP1 too: dcp-fix compare --pairs 20 tells them apart",
)
NOT_DCP = End(
    (),
    "it is wrong without DCP as well, so none of these defects is the cause",
    "the checkpoint, its quantisation, the chat template or the attention backend: try another --attention-backend, "
    "and transformers on the same prompt",
)
CRASH = Ask(
    "length",
    {
        "long": End(
            ("split-workspace", "flashinfer-workspace"),
            "long prompts make large batches, and the workspace of sparse decode grows with them",
        ),
        UNKNOWN: End(
            ("direct-a2a-layout", "flashinfer-workspace", "split-workspace"),
            "the direct all-to-all refuses strided heads, or the kernel's workspace is too small under DCP",
            "--dcp-comm-backend ag_rs avoids the direct all-to-all",
        ),
    },
)
REFUSED = End(
    ("configuration",),
    "a release refuses some combinations under DCP only once the model is loaded",
    'dcp-fix doctor --serve-args "..." checks yours',
)
WRONG = Ask(
    "dcp1",
    {"yes": NOT_DCP, UNKNOWN: Ask("load", {"yes": LOADED, UNKNOWN: Ask("cache", {"yes": CACHED, UNKNOWN: UNDER_DCP})})},
)
TREE = Ask("looks", {"refused": REFUSED, "crash": CRASH, UNKNOWN: WRONG})


def diagnose(answer) -> tuple[dict[str, str], End]:
    """(what was answered, the end): `answer(question)` gives one of the answers of QUESTIONS, or UNKNOWN."""
    node, said = TREE, {}
    while isinstance(node, Ask):
        said[node.question] = given = answer(node.question)
        node = node.leads.get(given, node.leads[UNKNOWN])
    return said, node


def parse(text: str) -> dict[str, str]:
    """Answers as JSON or as `looks=nan,dcp1=no`. UserError names what is no question and no answer to it."""
    try:
        given = json.loads(text) if text.lstrip().startswith("{") else dict(p.split("=") for p in text.split(",") if p)
    except (ValueError, RecursionError):
        raise UserError(f"--answers {shown(text, 60)!r}: give JSON, or looks=nan,dcp1=no") from None
    for question, answer in given.items():
        if question not in QUESTIONS:
            raise UserError(f"--answers: there is no question {shown(question, 40)!r}, only {', '.join(QUESTIONS)}")
        allowed = [*QUESTIONS[question][1], UNKNOWN]
        if answer not in allowed:
            raise UserError(f"--answers: {question} is answered by {', '.join(allowed)}, not {shown(answer, 40)!r}")
    return given


def as_json(said: dict[str, str], end: End) -> dict:
    """The diagnosis as data."""
    return {"answers": said, "probes": list(end.probes), "because": end.because, "other": end.other}
