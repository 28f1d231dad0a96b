"""One OpenAI-compatible endpoint (vLLM, SGLang): ask it for a greedy completion, with patience that has an end.

    Endpoint("A", "http://localhost:8000").complete("tiny", "q : what", max_tokens=32, salt="x")  ->  Completion

Request: `temperature` 0 and `logprobs` 1 from OpenAI's API; `return_token_ids`, `cache_salt`, `skip_special_tokens` and
`repetition_penalty`, which vLLM and SGLang add to it (token ids: vLLM PR 22587, SGLang PR 30917; older ones ignore it).

What may pass (no connection, one that breaks off, HTTP 429 or 5xx, an answer that is no completion) is tried again,
`len(WAITS)` times at most. A timeout is not: it would only queue the same work again. Every error names the endpoint.

It does not: stream, sample, use chat templates, send an API key, or judge an answer (compare.py).
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx

from dcp_fix.errors import UserError

TIMEOUT = 120.0  # seconds for one answer: 2,560 tokens of prefill behind a first request that still compiles kernels
CONNECT = 10.0  # seconds for a connection
WAITS = (0.5, 1.0, 2.0)  # seconds before the second, third and fourth attempt
PASSING = (429, 500, 502, 503, 504)
REFUSES_LOGPROBS = (400, 500)  # vLLM with --max-logprobs 0; vLLM and SGLang when a logprob is NaN, which JSON lacks
LARGEST = 1 << 24  # bytes of an answer


class EndpointError(UserError):
    """An endpoint that cannot be used: says which, what it did and what to do. `status`: of HTTP, where it is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Failure(Exception):
    """One attempt that failed. `passing`: another one may succeed."""

    def __init__(self, what: str, remedy: str, passing: bool = True, status: int | None = None) -> None:
        super().__init__(f"{what}: {remedy}")
        self.passing, self.status = passing, status


@dataclass(frozen=True)
class Completion:
    """An answer. What the endpoint does not offer is None; a logprob that is no number is NaN."""

    text: str
    token_ids: list[int] | None
    logprobs: list[float] | None
    prompt_tokens: int
    prompt_ids: list[int] | None
    cached_tokens: int | None
    logprobs_refused: str | None = None

    @property
    def encoded(self) -> bytes:
        """The text in UTF-8; a lone surrogate, which JSON can carry, keeps its bits."""
        return self.text.encode("utf-8", "surrogatepass")


class Endpoint:
    """The endpoint at `url` (with or without /v1), called `name` in messages; `timeout` in seconds for one answer."""

    def __init__(self, name: str, url: str, timeout: float = TIMEOUT) -> None:
        self.name, self.url, self.timeout = name, base_url(name, url), timeout
        limits = httpx.Limits(max_keepalive_connections=0)  # an idle one may be closed just as it is used again
        self.client = httpx.Client(timeout=httpx.Timeout(timeout, connect=min(CONNECT, timeout)), limits=limits)

    def __str__(self) -> str:
        return f"endpoint {self.name} ({self.url.copy_with(userinfo=b'')})"

    def models(self) -> list[str]:
        """The names of the models that it serves."""
        return self.ask("models", None, model_names)

    def complete(self, model: str, prompt: str, max_tokens: int, salt: str) -> Completion:
        """The greedy continuation. Requests with one `salt` share a prefix cache, others never do.

        Where asking for logprobs is what fails, the answer comes without them and `logprobs_refused` says why.
        """
        body = {
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "cache_salt": salt, "logprobs": 1,
            "temperature": 0, "repetition_penalty": 1.0,  # both: a model's generation_config may bring its own
            "return_token_ids": True, "skip_special_tokens": False,  # a special token must not vanish from the text
        }  # fmt: skip
        try:
            return self.ask("completions", body, completion)
        except EndpointError as error:
            if error.status not in REFUSES_LOGPROBS:
                raise
            del body["logprobs"]
            return replace(self.ask("completions", body, completion), logprobs_refused=f"HTTP {error.status}")

    def ask(self, path: str, body: dict | None, parse: Callable):
        """`parse` of the JSON answer to a POST of `body`, or to a GET. Raises EndpointError when attempts run out."""
        for wait in (*WAITS, None):
            try:
                return parse(self.attempt(path, body))
            except Failure as failure:
                if not failure.passing or wait is None:
                    tries = f" (tried {len(WAITS) + 1} times)" if failure.passing else ""
                    raise EndpointError(f"{self}: {failure}{tries}", failure.status) from None
            time.sleep(wait)

    def attempt(self, path: str, body: dict | None):
        """One request: the JSON of its answer. Raises Failure."""
        deadline = time.monotonic() + self.timeout
        slow = Failure(f"no whole answer within {self.timeout:g} s", "raise --timeout, or see its log", passing=False)
        url = self.url.copy_with(path=f"{self.url.path}/{path}")
        try:
            with self.client.stream("POST" if body else "GET", url, json=body) as response:
                content = read(response, deadline, slow)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Failure(f"no connection ({error})", "is it up, and is this its address?") from None
        except httpx.TimeoutException:
            raise slow from None
        except httpx.RequestError as error:
            raise Failure(f"the connection broke off ({error})", "did the server crash? See its log") from None
        return json_of(response.status_code, content)


def base_url(name: str, url: str) -> httpx.URL:
    """The address that ends in /v1. Raises UserError for what is no http address."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"endpoint {name}: {url!r} is no address ({error}); say http://host:port") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"endpoint {name}: {url!r} is no http address; say http://host:port")
    return parsed.copy_with(path=parsed.path.rstrip("/").removesuffix("/v1") + "/v1", query=None, fragment=None)


def read(response: httpx.Response, deadline: float, slow: Failure) -> bytes:
    """The whole body. Raises `slow` when it trickles in past the deadline: a timeout of httpx only counts silence."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if time.monotonic() > deadline:
            raise slow
        if len(content) > LARGEST:
            raise Failure(f"an answer of more than {LARGEST} bytes", "is this an inference server?", passing=False)
    return bytes(content)


def json_of(status: int, content: bytes):
    """The JSON of a successful answer. Raises Failure for another status, quoting the server, and for other content."""
    start = " ".join(content[:400].decode(errors="replace").split())[:200]
    if status != 200:
        remedy = "see the server's log" if status >= 500 else "is it an OpenAI-compatible server that needs no key?"
        raise Failure(f"HTTP {status} {start!r}", remedy, status in PASSING, status)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise Failure(f"an answer that is not JSON {start!r}", "is this an inference server?") from None


def model_names(answer) -> list[str]:
    """The ids in an answer of /v1/models. Raises Failure for another shape."""
    try:
        names = [card["id"] for card in answer["data"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise Failure(f"no list of models but {quote(answer)}", "is this an OpenAI-compatible server?")
    return names


def completion(answer) -> Completion:
    """The first choice of an answer of /v1/completions. Raises Failure for another shape."""
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        logprobs, details = choice.get("logprobs") or {}, usage.get("prompt_tokens_details") or {}
        if not isinstance(choice["text"], str):
            raise TypeError(type(choice["text"]))
        return Completion(
            text=choice["text"],
            token_ids=numbers(choice.get("token_ids")),
            logprobs=floats(logprobs.get("token_logprobs")),
            prompt_tokens=numbers([usage["prompt_tokens"]])[0],
            prompt_ids=numbers(choice.get("prompt_token_ids")),
            cached_tokens=numbers([details.get("cached_tokens") or 0])[0] if details else None,
        )
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError):
        raise Failure(f"no completion but {quote(answer)}", "is this an OpenAI-compatible server?") from None


def numbers(values) -> list[int] | None:
    """A list of token ids, or None for none. Raises TypeError for anything else."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise TypeError(values)
    return values


def floats(values) -> list[float] | None:
    """A list of logprobs, or None for none; what is no finite number, null included, is NaN. Raises TypeError."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) in (int, float, type(None)) for value in values):
        raise TypeError(values)
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in values]


def quote(answer) -> str:
    """The beginning of an answer, on one line."""
    return json.dumps(answer)[:200]
