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

With four GPUs there is room for one of them at a time. Then ask the first and keep its answers, and compare the second
with the file; other prompts, another model and other sampling are refused:

    dcp-fix compare --a http://localhost:8001 --save dcp1.json
    dcp-fix compare --a dcp1.json --b http://localhost:8002

Servers that are not bit-equal to themselves (other traffic, other kernels): `--pairs 20`, see pairs.py.

`--dcp-comm-backend ag_rs` is for Hopper: 0.29.0 to 0.32.0 pick `a2a`, which FLASHMLA_SPARSE refuses there. No
speculative decoding, no other traffic: both change what is computed together. `--enable-prompt-tokens-details` lets
vLLM report cached tokens. The flags were read in the sources of vLLM 0.30.0; this project has not run a model of that
size.

It does not: launch servers, send an API key, or say which endpoint is right.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dcp_fix.base import equality, output
from dcp_fix.base.errors import UserError
from dcp_fix.compare import address, ask
from dcp_fix.compare import pairs as compare_pairs
from dcp_fix.compare.answers import Completion
from dcp_fix.compare.ask import (
    Prompt,
    ask_twice,
    check_same_prompt,
    common_model,
    count,
    prompts,
    requests,
    words_per_token,
)
from dcp_fix.compare.endpoint import TIMEOUT, Endpoint, EndpointError
from dcp_fix.compare.pairs import Paired
from dcp_fix.compare.saved import Saved, SavedAnswers, digest


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
    """One prompt at both endpoints. Differences are the index of the first byte of the text and of the first token.

    `again`: what each said when it was asked a second time.
    """

    prompt: Prompt
    a: Completion
    b: Completion
    text_difference: int | None
    token_difference: int | None
    logprobs: Logprobs
    again: tuple[Completion, Completion] | None = None

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
    """All rows so far, and the error that ended the run, if one did. `pairs`: how many prompts, if not the classes."""

    a: Endpoint | Saved
    b: Endpoint | Saved
    pairs: int | None = None
    model: str | None = None
    rows: list[Row] = field(default_factory=list)
    error: str | None = None

    @property
    def paired(self) -> Paired | None:
        """The paired test; None where every answer has to be the same, and where the run was cut short."""
        return compare_pairs.test(self.rows) if self.pairs and not self.error else None

    @property
    def verdict(self) -> str:
        """equal, different, within noise, or cannot compare."""
        if self.error:
            return "cannot compare"
        if all(row.equal for row in self.rows):
            return "equal"
        return self.paired.verdict if self.paired else "different"

    @property
    def compared(self) -> str:
        """What equality means here."""
        return "text and token ids" if all(row.ids for row in self.rows) else "text only"


def run(a, b, progress: Callable[[str], None] = lambda what: None, pairs: int | None = None) -> Comparison:
    """Ask both endpoints everything; `progress(what)` is called before each request. Never raises for an endpoint.

    An endpoint may be answers that were saved.
    """
    result = Comparison(a, b, pairs)
    try:
        result.model = common_model(a, b, progress)
        for prompt in prompts(words_per_token(a, b, result.model, progress), pairs=pairs):
            answers = [ask_twice(side, result.model, prompt, progress, not pairs) for side in (a, b)]
            first, again = zip(*answers, strict=True)
            check_same_prompt(a, b, *first)
            if not any(answer.text for answer in first):
                raise EndpointError(f"{a} and {b} both answer {prompt.name} with no text at all: nothing to compare")
            result.rows.append(row(prompt, *first, again))
    except EndpointError as error:
        result.error = str(error)
    return result


def save(a: Endpoint, progress, pairs: int | None = None) -> Saved:
    """Ask one endpoint everything, and give its answers for a later comparison. Raises UserError."""
    progress(f"{a.name}: models")
    model = a.models()[0]
    counted, ratio = count(a, model, progress)
    made = prompts(ratio, pairs=pairs)
    answers = {}
    for prompt in made:
        first, again = ask_twice(a, model, prompt, progress, not pairs)
        answers[prompt.name] = SavedAnswers(prompt=digest(prompt), first=first, again=again)
    return Saved.of(a, model, pairs, ask.sampling(), counted, answers)


def row(prompt: Prompt, a: Completion, b: Completion, again=None) -> Row:
    """Compare two answers to one prompt."""
    offered = a.token_ids is not None and b.token_ids is not None
    text = equality.first_difference(a.encoded, b.encoded)
    tokens = equality.first_difference(a.token_ids, b.token_ids) if offered else None
    return Row(prompt, a, b, text, tokens, compare_logprobs(a, b, tokens if offered else text), again)


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


def side(name: str, given: str, timeout: float) -> Endpoint | Saved:
    """An endpoint at an address, or answers out of a file."""
    return Saved.load(name, Path(given)) if is_file(given) else Endpoint(name, given, timeout)


def is_file(given: str) -> bool:
    """Whether an address is a file: what ends in .json, and what there is a file of."""
    try:
        return "://" not in given and (given.endswith(".json") or Path(given).is_file())
    except (OSError, ValueError):
        return False


def main(
    a: str,
    b: str | None = None,
    json: Path | None = None,
    timeout: float = TIMEOUT,
    save_to: Path | None = None,
    pairs: int | None = None,
) -> int:
    """Compare, write JSON to the file `json` (`-`: to standard output, and nothing else there), print.

    With `save_to` and without `b`: keep the answers of A instead. Returns 0 if all is equal, or differs no more than
    the servers' own noise; 1 if anything differs. Raises UserError if it cannot be compared, after printing and writing
    what was compared before.
    """
    from dcp_fix.compare import report as compare_report

    if (b is None) == (save_to is None):
        raise UserError("give --b URL to compare with, or --save FILE to keep the answers of --a; not both")
    first = side("A", a, timeout)
    if b is None:
        return main_save(first, save_to, pairs)
    second = side("B", b, timeout)
    check_sides(first, second, pairs)
    ends = sum(isinstance(one, Endpoint) for one in (first, second))
    with compare_report.progress(requests(pairs, ends)) as progress:
        result = run(first, second, progress, pairs)
    output.deliver(json, compare_report.as_json(result), compare_report.show, result)
    if result.error:
        raise UserError(result.error)
    return 1 if result.verdict == "different" else 0


def main_save(a, path: Path, pairs: int | None) -> int:
    """Keep the answers of an endpoint."""
    from dcp_fix.compare import report as compare_report

    if isinstance(a, Saved):
        raise UserError(f"--a {a} is saved already; name the address of a server")
    with compare_report.progress(requests(pairs, 1)) as progress:
        answers = save(a, progress, pairs)
    output.deliver(path, answers.content.model_dump(), compare_report.saved, a, path)
    return 0


def check_sides(a, b, pairs: int | None) -> None:
    """Raise UserError for what is one server, and for answers that were saved for something else."""
    if isinstance(a, Endpoint) and isinstance(b, Endpoint) and address.same_server(a.url, b.url):
        raise UserError(f"{a} and {b} are one server: whatever it answers equals itself; name two endpoints")
    for one in (a, b):
        if isinstance(one, Saved):
            one.check(pairs, ask.sampling())
