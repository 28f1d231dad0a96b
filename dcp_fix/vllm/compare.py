"""Two serving endpoints, byte for byte: the command `dcp-fix compare --a URL --b URL`.

Three prompts, as in upstream's own proof of the fixes (vLLM PR 50005): 512 tokens uncached, 1536 uncached, 1024 cached
and 1536 on top, where the cached ones are sent first, as a request of their own. Each prompt goes to each endpoint
twice, greedily; an endpoint that does not agree with itself can be compared with nothing.

Equal means: the same text, as UTF-8 bytes, and the same token ids where both endpoints offer them (the report says
which). Logprobs are reported where offered: they may differ in the last digits, but one that is a number here and NaN
there is a difference.

A and B are GLM-5.2 on four H200 each, such as the two halves of one host (upstream's report: vLLM issue 50095):

    CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve nvidia/GLM-5.2-NVFP4 --port 8001 \\
        --tensor-parallel-size 4 --kv-cache-dtype fp8_ds_mla \\
        --enable-prefix-caching --enable-prompt-tokens-details
    CUDA_VISIBLE_DEVICES=4,5,6,7 vllm serve nvidia/GLM-5.2-NVFP4 --port 8002 \\
        --tensor-parallel-size 4 --kv-cache-dtype fp8_ds_mla \\
        --decode-context-parallel-size 4 --dcp-comm-backend ag_rs \\
        --enable-prefix-caching --enable-prompt-tokens-details
    dcp-fix compare --a http://localhost:8001 --b http://localhost:8002

`--dcp-comm-backend ag_rs` is for Hopper: 0.30.0 picks `a2a`, which FLASHMLA_SPARSE refuses. No speculative decoding, no
other traffic: both change what is computed together. `--enable-prompt-tokens-details` lets vLLM report cached tokens.
The flags were read in the sources of vLLM 0.30.0; this project has not run a model of that size.

The prompts are the small world of tiny/corpus.py: plain English words, sized by how many tokens the endpoint counts.

It does not: launch servers, send an API key, or say which endpoint is right.
"""

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from dcp_fix import equality
from dcp_fix.errors import UserError
from dcp_fix.tiny import corpus
from dcp_fix.vllm.endpoint import TIMEOUT, Completion, Endpoint, EndpointError

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


@dataclass(frozen=True)
class Logprobs:
    """The logprobs of the `count` leading tokens that both answers share; `largest` difference of those with numbers.

    `missing`: why there are none to compare. `not_numbers`: NaN in A and in B.
    """

    count: int = 0
    identical: bool = False
    largest: float = 0.0
    not_numbers: tuple[int, int] = (0, 0)
    missing: str | None = None


@dataclass(frozen=True)
class Row:
    """One prompt at both endpoints. Differences are the index of the first byte of the text and of the first token."""

    prompt: Prompt
    a: Completion
    b: Completion
    text_difference: int | None
    token_difference: int | None
    logprobs: Logprobs

    @property
    def equal(self) -> bool:
        """Text, ids where both have them, and which logprobs are numbers."""
        a, b = self.logprobs.not_numbers
        return self.text_difference is None and self.token_difference is None and a == b

    @property
    def ids(self) -> bool:
        """Whether both endpoints offered token ids."""
        return self.a.token_ids is not None and self.b.token_ids is not None


@dataclass
class Comparison:
    """All rows so far, and the error that ended the run, if one did."""

    a: Endpoint
    b: Endpoint
    model: str | None = None
    rows: list[Row] = field(default_factory=list)
    error: str | None = None

    @property
    def verdict(self) -> str:
        """equal, different, or cannot compare."""
        if self.error:
            return "cannot compare"
        return "equal" if all(row.equal for row in self.rows) else "different"

    @property
    def compared(self) -> str:
        """What equality means here."""
        return "text and token ids" if all(row.ids for row in self.rows) else "text only"


def run(a: Endpoint, b: Endpoint, progress: Callable[[str], None] = lambda what: None) -> Comparison:
    """Ask both endpoints everything; `progress(what)` is called before each request. Never raises for an endpoint."""
    result = Comparison(a, b)
    try:
        result.model = common_model(a, b, progress)
        for prompt in prompts(words_per_token(a, b, result.model, progress)):
            answers = [ask_twice(endpoint, result.model, prompt, progress) for endpoint in (a, b)]
            check_same_prompt(a, b, *answers)
            if not any(answer.text for answer in answers):
                raise EndpointError(f"{a} and {b} both answer {prompt.name} with no text at all: nothing to compare")
            result.rows.append(row(prompt, *answers))
    except EndpointError as error:
        result.error = str(error)
    return result


def requests() -> int:
    """How many requests a run makes if none fails: to both endpoints models, counting, and each prompt twice."""
    return 2 * (2 + sum(2 * (1 + bool(cached)) for *_, cached in CLASSES.values()))


def common_model(a: Endpoint, b: Endpoint, progress) -> str:
    """The first model of A that B serves too. Raises EndpointError if there is none."""
    served = []
    for endpoint in (a, b):
        progress(f"{endpoint.name}: models")
        served.append(endpoint.models())
    for name in served[0]:
        if name in served[1]:
            return name
    names = " and ".join(f"{end} serves {', '.join(names)}" for end, names in zip((a, b), served, strict=True))
    raise EndpointError(f"wrong model: {names}; serve one model at both, under one --served-model-name")


def words_per_token(a: Endpoint, b: Endpoint, model: str, progress) -> float:
    """How many words of the corpus the model's tokenizer counts as a token. Raises EndpointError if A and B differ."""
    (probe,) = prompts(1.0, list(CLASSES)[:1])
    counted = []
    for endpoint in (a, b):
        progress(f"{endpoint.name}: counting tokens")
        counted.append(endpoint.complete(model, probe.text, 1, uuid.uuid4().hex))
    check_same_prompt(a, b, *counted)
    words, tokens = len(probe.text.split()), counted[0].prompt_tokens
    if not SANE[0] * tokens <= words <= SANE[1] * tokens:
        raise EndpointError(f"{a}: counts {tokens} tokens in {words} English words; does it cut prompts short?")
    return words / tokens


def prompts(ratio: float, names=None) -> list[Prompt]:
    """The prompts, sized so that at `ratio` words a token they have about the tokens of their class."""
    made = []
    for name in names or CLASSES:
        tokens, facts, cached = CLASSES[name]
        ids = corpus.prompt(Random(f"compare {name}"), round(tokens * ratio) + 1, facts).ids
        words = corpus.decode(ids[1:]).split()  # without <s>: whether there is one is the tokenizer's business
        prefix = words[: round((cached + MARGIN) * ratio)] if cached else []
        made.append(Prompt(name, " ".join(words), " ".join(prefix)))
    return made


def ask_twice(endpoint: Endpoint, model: str, prompt: Prompt, progress) -> Completion:
    """The answer, which asking again must give again. Raises EndpointError if it does not."""
    first, again = (ask(endpoint, model, prompt, progress, attempt) for attempt in ("", ", again"))
    if (first.text, first.token_ids) != (again.text, again.token_ids):
        answers = f"{first.text[:60]!r}, then {again.text[:60]!r}"
        raise EndpointError(f"{endpoint} is not greedy: asked {prompt.name} twice, it said {answers}; {DISAGREES}")
    return first


def ask(endpoint: Endpoint, model: str, prompt: Prompt, progress, attempt: str) -> Completion:
    """One answer out of a prefix cache that holds the prefix and, thanks to a fresh salt, nothing else."""
    salt = uuid.uuid4().hex
    if prompt.prefix:
        progress(f"{endpoint.name}: {prompt.name}, the part to be cached{attempt}")
        endpoint.complete(model, prompt.prefix, 1, salt)
    progress(f"{endpoint.name}: {prompt.name}{attempt}")
    return endpoint.complete(model, prompt.text, NEW_TOKENS, salt)


def check_same_prompt(a: Endpoint, b: Endpoint, of_a: Completion, of_b: Completion) -> None:
    """Raise EndpointError if one text became two different prompts."""
    ids_differ = None not in (of_a.prompt_ids, of_b.prompt_ids) and of_a.prompt_ids != of_b.prompt_ids
    if ids_differ or of_a.prompt_tokens != of_b.prompt_tokens:
        counts = f"{of_a.prompt_tokens} tokens at {a} and {of_b.prompt_tokens} others at {b}"
        raise EndpointError(f"wrong model: one prompt is {counts}; do both load the same tokenizer?")


def row(prompt: Prompt, a: Completion, b: Completion) -> Row:
    """Compare two answers to one prompt."""
    offered = a.token_ids is not None and b.token_ids is not None
    text = equality.first_difference(a.encoded, b.encoded)
    tokens = equality.first_difference(a.token_ids, b.token_ids) if offered else None
    return Row(prompt, a, b, text, tokens, compare_logprobs(a, b, tokens if offered else text))


def compare_logprobs(a: Completion, b: Completion, difference: int | None) -> Logprobs:
    """Logprobs up to the first token that differs. Without ids nobody knows which that is: then only of equal texts."""
    lacking = [
        f"{name} offers none" + (f" ({one.logprobs_refused} when asked, as for NaN)" if one.logprobs_refused else "")
        for name, one in (("A", a), ("B", b))
        if one.logprobs is None
    ]
    if lacking:
        return Logprobs(missing="; ".join(lacking))
    shared = min(len(a.logprobs), len(b.logprobs))
    if difference is not None:
        shared = min(shared, difference) if a.token_ids and b.token_ids else 0
    if not shared:
        return Logprobs(missing="no token in common")
    pairs = list(zip(a.logprobs[:shared], b.logprobs[:shared], strict=True))
    apart = [abs(x - y) for x, y in pairs if not math.isnan(x - y)]
    not_numbers = tuple(sum(math.isnan(pair[side]) for pair in pairs) for side in (0, 1))
    same = all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in pairs)
    return Logprobs(shared, same, max(apart, default=0.0), not_numbers)


def main(a: str, b: str, json: Path | None = None, timeout: float = TIMEOUT) -> int:
    """Compare, print, write JSON to the file `json` (`-`: to standard output, and nothing else there).

    Returns 0 if all is equal, 1 if anything differs. Raises UserError if it cannot be compared, after printing and
    writing what was compared before.
    """
    from dcp_fix.vllm import compare_report

    endpoints = Endpoint("A", a, timeout), Endpoint("B", b, timeout)
    if endpoints[0].url == endpoints[1].url:
        raise UserError(f"--a and --b are both {b}: whatever it answers equals itself; name two endpoints")
    with compare_report.progress(requests()) as progress:
        result = run(*endpoints, progress)
    to_stdout = json is not None and str(json) == "-"
    if not to_stdout:
        compare_report.show(result)
    if json:
        compare_report.write(None if to_stdout else json, result)
    if result.error:
        raise UserError(result.error)
    return 0 if result.verdict == "equal" else 1
