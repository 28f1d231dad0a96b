"""What compare asks and how: prompts of three classes, sized by the tokens that an endpoint counts, each sent twice.

The prompts are the small world of tiny/corpus.py: plain English words. A side of a comparison is an Endpoint, which is
asked, or Saved answers, which are looked up.

Not here: comparing what was answered (compare.py).
"""

import uuid
from dataclasses import dataclass
from random import Random

from dcp_fix.base.errors import shown
from dcp_fix.compare.answers import Completion
from dcp_fix.compare.endpoint import SAMPLING, Endpoint, EndpointError
from dcp_fix.compare.saved import Saved
from dcp_fix.tiny import corpus

CLASSES = {name: (*corpus.CLASSES[name], corpus.CACHED.get(name, 0)) for name in ("512", "1536", "1024+1536")}
NEW_TOKENS = 32
MARGIN = 16  # tokens more in the part to be cached: only whole blocks are, and token counts are estimates
SANE = (0.4, 1.1)  # words per token of a tokenizer that knows English; beyond it, the endpoint counts something else
DISAGREES = "it samples, serves other traffic in the same batch, or reads memory that nobody wrote (try dcp-fix doctor)"


@dataclass(frozen=True)
class Prompt:
    """One prompt; `prefix`, if any, is its beginning, to be cached by a request of its own."""

    name: str
    text: str
    prefix: str = ""


def common_model(a, b, progress) -> str:
    """The first model of A that B serves too. Raises EndpointError if there is none."""
    served = []
    for side in (a, b):
        if isinstance(side, Endpoint):
            progress(f"{side.name}: models")
        served.append(side.models())
    for name in served[0]:
        if name in served[1]:
            return name
    names = " and ".join(f"{end} serves {shown(', '.join(names))}" for end, names in zip((a, b), served, strict=True))
    raise EndpointError(f"wrong model: {names}; serve one model at both, under one --served-model-name")


def words_per_token(a, b, model: str, progress) -> float:
    """How many words of the corpus the model's tokenizer counts as a token. Raises EndpointError if A and B differ."""
    counted = [count(side, model, progress) for side in (a, b)]
    check_same_prompt(a, b, *(answer for answer, _ in counted))
    return counted[0][1]


def count(side, model: str, progress) -> tuple[Completion, float]:
    """(the answer to a prompt that is only to be counted, words per token)"""
    (probe,) = prompts(1.0, list(CLASSES)[:1])
    if isinstance(side, Saved):
        answer = side.counting
    else:
        progress(f"{side.name}: counting tokens")
        answer = side.complete(model, probe.text, 1, uuid.uuid4().hex)
        check_finished(side, "a prompt to be counted", answer, 1)
    words, tokens = len(probe.text.split()), answer.prompt_tokens
    if not SANE[0] * tokens <= words <= SANE[1] * tokens:
        raise EndpointError(f"{side}: counts {tokens} tokens in {words} English words; does it cut prompts short?")
    return answer, words / tokens


def named(pairs: int | None) -> list[tuple[str, str]]:
    """(name, class) of every prompt of a run: the classes, or `pairs` prompts that take the classes in turn."""
    kinds = list(CLASSES)
    if not pairs:
        return [(kind, kind) for kind in kinds]
    return [(f"{kinds[i % len(kinds)]} #{i}", kinds[i % len(kinds)]) for i in range(pairs)]


def prompts(ratio: float, names=None, pairs: int | None = None) -> list[Prompt]:
    """The prompts, sized so that at `ratio` words a token they have about the tokens of their class."""
    made = []
    for name, kind in [(n, n) for n in names] if names else named(pairs):
        tokens, facts, cached = CLASSES[kind]
        ids = corpus.prompt(Random(f"compare {name}"), round(tokens * ratio) + 1, facts).ids
        words = corpus.decode(ids[1:]).split()  # without <s>: whether there is one is the tokenizer's business
        prefix = words[: round((cached + MARGIN) * ratio)] if cached else []
        made.append(Prompt(name, " ".join(words), " ".join(prefix)))
    return made


def ask_twice(side, model: str, prompt: Prompt, progress, greedy: bool = True) -> tuple[Completion, Completion]:
    """The answer, and what it says when asked again: the same, if it has to be `greedy`. Raises EndpointError."""
    if isinstance(side, Saved):
        first, again = side.answers_to(prompt)
    else:
        first, again = (ask(side, model, prompt, progress, attempt) for attempt in ("", ", again"))
    if greedy and (first.text, first.token_ids) != (again.text, again.token_ids):
        answers = f"{first.text[:60]!r}, then {again.text[:60]!r}"
        raise EndpointError(f"{side} is not greedy: asked {prompt.name} twice, it said {answers}; {DISAGREES}")
    return first, again


def ask(endpoint: Endpoint, model: str, prompt: Prompt, progress, attempt: str) -> Completion:
    """One answer out of a prefix cache that holds the prefix and, thanks to a fresh salt, nothing else."""
    salt = uuid.uuid4().hex
    if prompt.prefix:
        progress(f"{endpoint.name}: {prompt.name}, the part to be cached{attempt}")
        check_finished(endpoint, prompt.name, endpoint.complete(model, prompt.prefix, 1, salt), 1)
    progress(f"{endpoint.name}: {prompt.name}{attempt}")
    answer = endpoint.complete(model, prompt.text, NEW_TOKENS, salt)
    check_finished(endpoint, prompt.name, answer, NEW_TOKENS)
    return answer


def check_finished(endpoint: Endpoint, name: str, answer: Completion, asked: int) -> None:
    """Raise EndpointError for an answer that was broken off: two of them could be equal."""
    made = answer.completion_tokens
    if made is None and answer.token_ids is not None:
        made = len(answer.token_ids)
    after = f"after {'an unknown number' if made is None else made} of {asked} tokens"
    if answer.finish_reason not in ("stop", "length"):
        reason = shown(answer.finish_reason, 40)
        raise EndpointError(f"{endpoint} ended {name} with finish_reason {reason!r} {after}: nothing to compare")
    if answer.finish_reason == "length" and made is not None and made < asked:
        raise EndpointError(f"{endpoint} ended {name} for its length {after}: does it limit answers by itself?")


def check_same_prompt(a, b, of_a: Completion, of_b: Completion) -> None:
    """Raise EndpointError if one text became two different prompts."""
    ids_differ = None not in (of_a.prompt_ids, of_b.prompt_ids) and of_a.prompt_ids != of_b.prompt_ids
    if ids_differ or of_a.prompt_tokens != of_b.prompt_tokens:
        counts = f"{of_a.prompt_tokens} tokens at {a} and {of_b.prompt_tokens} others at {b}"
        raise EndpointError(f"wrong model: one prompt is {counts}; do both load the same tokenizer?")


def requests(pairs: int | None = None, ends: int = 2) -> int:
    """How many requests a run makes if none fails: to each endpoint models, counting, and each prompt twice."""
    return ends * (2 + sum(2 * (1 + bool(CLASSES[kind][2])) for _, kind in named(pairs)))


def sampling() -> dict:
    """How every prompt is answered: what two comparisons must have in common."""
    return SAMPLING | {"max_tokens": NEW_TOKENS}
