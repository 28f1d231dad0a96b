"""One OpenAI-compatible endpoint (vLLM, SGLang): ask it for greedy completions, with patience that has an end.

    Endpoint("A", "http://localhost:8000").answers_to("tiny", Prompt("short", "q : what"))  ->  (Completion, Completion)

Request: `temperature` 0 and `logprobs` 1 from OpenAI's API; `return_token_ids`, `cache_salt`, `skip_special_tokens` and
`repetition_penalty`, which vLLM and SGLang add to it (token ids: vLLM PR 22587, SGLang PR 30917; older ones ignore it).

It does not: sample, use chat templates, send an API key, go through a proxy, try again, or judge an answer
(compare.py). Every error names the endpoint, none a password.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx

from dcp_fix.base.errors import UserError, shown
from dcp_fix.compare.answers import Completion, EndpointError, completion, json_of, model_names
from dcp_fix.compare.prompts import NEW_TOKENS, SAMPLING, Prompt

TIMEOUT = 120.0  # seconds for one answer: 2,560 tokens of prefill behind a first request that still compiles kernels
CONNECT = 10.0  # seconds for a connection
REFUSES_LOGPROBS = (400, 500)  # vLLM with --max-logprobs 0; vLLM and SGLang when a logprob is NaN, which JSON lacks
LARGEST = 1 << 24  # bytes of an answer
HOST = re.compile(r"[^\s%/@\\]+")  # % is what became of a blank or a control character


def base_url(name: str, url: str) -> httpx.URL:
    """The address that ends in /v1. Raises UserError, which shows no user and no password, for what is none."""
    try:
        parsed = httpx.URL(url)
        whole = parsed.copy_with(path=parsed.path.rstrip("/").removesuffix("/v1") + "/v1", query=None, fragment=None)
        if parsed.scheme in ("http", "https") and HOST.fullmatch(parsed.host) and 0 < (parsed.port or 80) < 1 << 16:
            return whole
    except (httpx.InvalidURL, UnicodeError):
        pass
    raise UserError(f"endpoint {name}: {shown(url.rpartition('@')[2])!r} is no address; say http://host:port")


def place(url: httpx.URL) -> tuple[str, int, str]:
    """(host, port, path), the same for every spelling of one server's address."""
    host = url.host.rstrip(".").lower()
    with suppress(OSError):
        host = socket.inet_ntoa(socket.inet_aton(host))  # 2130706433 and 127.1 are 127.0.0.1
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        host = "localhost" if address.is_loopback or address.is_unspecified else str(address)
    return host, url.port or {"http": 80, "https": 443}[url.scheme], url.path


class Endpoint:
    """The endpoint at `url` (with or without /v1), called `name` in messages; `timeout` in seconds for one answer."""

    def __init__(self, name: str, url: str, timeout: float = TIMEOUT) -> None:
        self.name, self.url, self.timeout = name, base_url(name, url), timeout
        self.tls = ssl.create_default_context() if self.url.scheme == "https" else False

    def __str__(self) -> str:
        return f"endpoint {self.name} ({self.url.copy_with(userinfo=b'')})"

    def __eq__(self, other: object) -> bool:
        """Whether both addresses lead to one server."""
        return isinstance(other, Endpoint) and place(self.url) == place(other.url)

    def models(self) -> list[str]:
        """The names of the models that it serves."""
        return self.ask("models", None, model_names)

    def answers_to(self, model: str, prompt: Prompt) -> tuple[Completion, Completion]:
        """Its answer, and what it says when it is asked again. Raises EndpointError.

        Each out of a prefix cache that holds the prefix and, thanks to a fresh salt, nothing else.
        """
        answers = []
        for salt in (uuid.uuid4().hex, uuid.uuid4().hex):
            if prompt.prefix:
                self.complete(model, prompt.prefix, 1, f"{prompt.name}, the part to be cached", salt)
            answers.append(self.complete(model, prompt.text, NEW_TOKENS, prompt.name, salt))
        return answers[0], answers[1]

    def complete(self, model: str, text: str, tokens: int, name: str, salt: str) -> Completion:
        """The greedy continuation, whole; without logprobs where asking for them is what fails.

        Requests with one `salt` share a prefix cache, others never do.
        """
        print(f"{self.name}: {name}", file=sys.stderr, flush=True)
        body = {"model": model, "prompt": text, "max_tokens": tokens, "cache_salt": salt, "return_token_ids": True}
        try:
            answer = self.ask("completions", body | SAMPLING | {"logprobs": 1}, completion)
        except EndpointError as error:
            if error.status not in REFUSES_LOGPROBS:
                raise
            print(f"{self.name}: HTTP {error.status}, as for NaN; asked without logprobs", file=sys.stderr, flush=True)
            answer = self.ask("completions", body | SAMPLING, completion)
        answer.check_finished(self, name, tokens)
        return answer

    def ask(self, path: str, body: dict | None, parse: Callable[[Any], Any]) -> Any:
        """`parse` of the JSON answer to a POST of `body`, or to a GET. Raises EndpointError."""
        try:
            return parse(self.attempt(path, body))
        except EndpointError as error:
            raise EndpointError(f"{self}: {str(error).splitlines()[0]}", error.status) from None

    def attempt(self, path: str, body: dict | None) -> Any:
        """One request: the JSON of its answer. Raises EndpointError."""
        url = self.url.copy_with(path=f"{self.url.path}/{path}")
        try:  # in a thread of its own, since the caller may be in an event loop, as notebooks are
            status, content = ThreadPoolExecutor(1).submit(asyncio.run, self.exchange(url, body)).result()
        except TimeoutError:
            raise EndpointError(f"no whole answer within {self.timeout:g} s: raise --timeout, or see its log") from None
        except (httpx.ConnectError, httpx.ConnectTimeout, UnicodeError) as error:
            raise EndpointError(f"no connection ({error}): is it up, and is this its address?") from None
        except (httpx.RequestError, OSError) as error:
            raise EndpointError(f"the connection broke off ({error}): did the server crash? See its log") from None
        return json_of(status, content)

    async def exchange(self, url: httpx.URL, body: dict | None) -> tuple[int, bytes]:
        """(status, body) of one request. Raises TimeoutError at its end, whatever trickles in until then."""
        plain = {"Accept-Encoding": "identity"}  # what is compressed is as long as it likes once it is not
        wait = httpx.Timeout(None, connect=CONNECT)
        client = httpx.AsyncClient(timeout=wait, headers=plain, verify=self.tls, trust_env=False)
        content = bytearray()
        async with asyncio.timeout(self.timeout), client:
            async with client.stream("POST" if body else "GET", url, json=body) as response:
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise EndpointError("a compressed answer, which was not asked for: is this an inference server?")
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > LARGEST:
                        raise EndpointError(f"an answer of more than {LARGEST} bytes: is this an inference server?")
                return response.status_code, bytes(content)
