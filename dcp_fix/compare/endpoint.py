"""One OpenAI-compatible endpoint (vLLM, SGLang): ask it for a greedy completion, with patience that has an end.

    Endpoint("A", "http://localhost:8000").complete("tiny", "q : what", max_tokens=32, salt="x")  ->  Completion

Request: `temperature` 0 and `logprobs` 1 from OpenAI's API; `return_token_ids`, `cache_salt`, `skip_special_tokens` and
`repetition_penalty`, which vLLM and SGLang add to it (token ids: vLLM PR 22587, SGLang PR 30917; older ones ignore it).

What may pass (no connection, one that breaks off, HTTP 429 or 5xx, an answer that is no completion) is tried again,
`len(WAITS)` times at most. A timeout is not: it would only queue the same work again. Every error names the endpoint.

It does not: stream, sample, use chat templates, send an API key, or judge an answer (compare.py).
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable

import httpx

from dcp_fix.base.errors import UserError
from dcp_fix.compare import address
from dcp_fix.compare.answers import Completion, Failure, completion, json_of, model_names

TIMEOUT = 120.0  # seconds for one answer: 2,560 tokens of prefill behind a first request that still compiles kernels
LONGEST = 86_400  # seconds that may be asked for
CONNECT = 10.0  # seconds for a connection
WAITS = (0.5, 1.0, 2.0)  # seconds before the second, third and fourth attempt
# Both numbers: a model's generation_config may bring its own. A special token must not vanish from the text.
SAMPLING = {"temperature": 0, "repetition_penalty": 1.0, "skip_special_tokens": False}
REFUSES_LOGPROBS = (400, 500)  # vLLM with --max-logprobs 0; vLLM and SGLang when a logprob is NaN, which JSON lacks
LARGEST = 1 << 24  # bytes of an answer


class EndpointError(UserError):
    """An endpoint that cannot be used: says which, what it did and what to do. `status`: of HTTP, where it is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """The endpoint at `url` (with or without /v1), called `name` in messages; `timeout` in seconds for one answer."""

    def __init__(self, name: str, url: str, timeout: float = TIMEOUT) -> None:
        if not 0 < timeout <= LONGEST:
            raise UserError(f"--timeout {timeout:g}: seconds between 0 and {LONGEST} are wanted")
        self.name, self.url, self.timeout = name, address.base_url(name, url), timeout
        self.tls, self.proxy = address.tls_of(self.url), address.proxy_of(self.url)

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
            "return_token_ids": True, **SAMPLING,
        }  # fmt: skip
        try:
            return self.ask("completions", body, completion)
        except EndpointError as error:
            if error.status not in REFUSES_LOGPROBS:
                raise
            del body["logprobs"]
            said = {"logprobs_refused": f"HTTP {error.status}"}
            return self.ask("completions", body, completion).model_copy(update=said)

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
        """One request: the JSON of its answer. Raises Failure, also where all of it takes longer than `timeout`."""
        url = self.url.copy_with(path=f"{self.url.path}/{path}")
        try:
            return json_of(*in_thread(self.exchange(url, body)), self.proxy)
        except TimeoutError:
            what = f"no whole answer within {self.timeout:g} s"
            raise Failure(what, "raise --timeout, or see its log", passing=False) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            way = f" {self.proxy}" if self.proxy else ""
            remedy = (
                "is the proxy right? NO_PROXY exempts a host" if self.proxy else "is it up, and is this its address?"
            )
            raise Failure(f"no connection{way} ({error})", remedy) from None
        except (httpx.RequestError, OSError) as error:
            raise Failure(f"the connection broke off ({error})", "did the server crash? See its log") from None
        except UnicodeError as error:
            raise Failure(f"no connection ({error})", "is this the name of a host?", passing=False) from None

    async def exchange(self, url, body: dict | None) -> tuple[int, bytes]:
        """(status, body) of one request. Raises TimeoutError at its end, whatever trickles in until then."""
        timeout = httpx.Timeout(self.timeout, connect=min(CONNECT, self.timeout))
        try:
            async with (
                asyncio.timeout(self.timeout),
                address.client_of(self.name, self.url, self.tls, timeout) as client,
            ):
                async with client.stream("POST" if body else "GET", url, json=body) as response:
                    return response.status_code, await read(response)
        except httpx.ConnectTimeout:
            raise
        except httpx.TimeoutException:
            raise TimeoutError from None


def in_thread(work):
    """The result of a coroutine, run in a thread of its own: the caller may be in an event loop, as notebooks are."""
    results = queue.SimpleQueue()

    def run():
        try:
            results.put((asyncio.run(work), None))
        except BaseException as error:  # noqa: BLE001 raised again where it is waited for
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    result, error = results.get()
    if error is not None:
        raise error
    return result


async def read(response: httpx.Response) -> bytes:
    """The whole body, up to LARGEST bytes."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > LARGEST:
            raise Failure(f"an answer of more than {LARGEST} bytes", "is this an inference server?", passing=False)
    return bytes(content)
