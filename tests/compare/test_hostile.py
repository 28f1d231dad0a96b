"""What lies between compare and a server: broken answers, proxies, certificates, names, drips, passwords."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.compare import address, answers, ask, compare, endpoint
from dcp_fix.compare.endpoint import Endpoint
from tests.compare.test_compare import SHORT, closed_port, edited, refused, run, status, stub
from tests.json_values import VALUES, damaged
from tests.serve import openai, serving

pytestmark = pytest.mark.timeout(120)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short prompts, short waits, and no proxy but a test's own."""
    monkeypatch.setattr(ask, "CLASSES", SHORT)
    monkeypatch.setattr(ask, "NEW_TOKENS", 12)
    monkeypatch.setattr(endpoint, "WAITS", (0.01, 0.02, 0.03))
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


# --- whatever a server answers ----------------------------------------------------------------------------------------

LOGPROBS = {"token_logprobs": [-0.5, -1.5]}
CHOICE = {"text": "a b", "token_ids": [5, 6], "prompt_token_ids": [1, 2], "logprobs": LOGPROBS, "finish_reason": "stop"}
DETAILS = {"cached_tokens": 1}
SOUND = {
    "choices": [CHOICE], "usage": {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": DETAILS}
}  # fmt: skip


def one_line(failure):
    assert str(failure).isprintable() and len(str(failure)) < 1000


# The fixture above is of no account here.
any_answer = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@any_answer
@given(st.sampled_from([200, 200, 404, 503]), st.binary(max_size=60) | VALUES.map(json.dumps).map(str.encode))
def test_any_content_is_json_or_one_line(status, content):
    try:
        got = answers.json_of(status, content, None)
    except answers.Failure as failure:
        one_line(failure)
        assert failure.passing == (status != 404)
    else:
        assert status == 200 and json.dumps(got) == json.dumps(json.loads(content))


@any_answer
@given(damaged(SOUND))
@example(SOUND | {"usage": {"prompt_tokens": -1}})
def test_any_answer_is_a_completion_as_it_is_or_one_line(answer):
    try:
        got = answers.completion(answer)
    except answers.Failure as failure:
        return one_line(failure)
    choice, usage = answer["choices"][0], answer["usage"]
    assert got.text == choice["text"] and got.token_ids in (None, choice.get("token_ids"))
    assert (got.prompt_ids, got.prompt_tokens) == (choice.get("prompt_token_ids"), usage["prompt_tokens"])
    counts = [*(got.token_ids or []), *(got.prompt_ids or []), got.prompt_tokens, got.cached_tokens or 0]
    assert all(type(count) is int and count >= 0 for count in counts) and isinstance(got.encoded, bytes)


@any_answer
@given(damaged({"data": [{"id": "a"}, {"id": "b"}]}) | VALUES)
def test_any_list_of_models_is_names_or_one_line(answer):
    try:
        names = answers.model_names(answer)
    except answers.Failure as failure:
        return one_line(failure)
    assert names == [card["id"] for card in answer["data"]] and all(isinstance(name, str) for name in names)


# --- answers that are broken off, or not whole ------------------------------------------------------------------------


def ending(reason, tokens=None):
    """Both servers end every answer like this."""

    def change(choice, answer):
        choice["finish_reason"] = reason
        if tokens is not None:
            choice["token_ids"] = choice["token_ids"][:tokens]
            answer["usage"]["completion_tokens"] = tokens

    return edited(change)


@pytest.mark.parametrize("reason", ["abort", "error", "content_filter", None, "\x1b[2J"])
def test_answers_that_were_broken_off_are_not_compared(reason):
    error = refused(ending(reason, 1), ending(reason, 1))
    assert "endpoint A" in error and "finish_reason" in error and "after 1 of 1 tokens" in error and "\x1b" not in error


def test_a_long_answer_that_is_broken_off_says_after_how_many_tokens():
    def late(choice, answer):
        if len(choice["token_ids"]) > 1:
            choice["finish_reason"] = "abort"
            answer["usage"]["completion_tokens"] = 5

    result = run(openai(stub), edited(late))
    assert "endpoint B" in result.error and "ended 96 with finish_reason 'abort' after 5 of 12 tokens" in result.error


def test_a_length_that_was_not_asked_for_is_not_compared():
    def limited(choice, answer):
        if len(choice["token_ids"]) > 1:
            choice |= {"finish_reason": "length", "token_ids": choice["token_ids"][:3]}
            answer["usage"]["completion_tokens"] = 3

    error = run(openai(stub), edited(limited)).error
    assert "ended 96 for its length after 3 of 12 tokens" in error and "limit" in error


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_answers_that_ended_as_they_should_are(reason):
    def change(choice, answer):
        choice["finish_reason"] = "length" if len(choice["token_ids"]) == 1 else reason
        answer["usage"]["completion_tokens"] = 12 if reason == "length" else len(choice["token_ids"])
        choice["token_ids"] = [1] * answer["usage"]["completion_tokens"]

    assert run(edited(change), edited(change)).verdict == "equal"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda choice, answer: choice.update(token_ids=[]), "B offers none beside a text"),
        (lambda choice, answer: answer["usage"].update(completion_tokens=999), "B offers 9 for 999 tokens"),
    ],
)
def test_ids_that_are_not_those_of_the_answer_are_not_offered(monkeypatch, capsys, change, says):
    def late(choice, answer):
        if len(choice["token_ids"]) > 1:
            change(choice, answer)

    with serving(openai(stub)) as a, serving(edited(late)) as b:
        assert status(monkeypatch, "--a", a, "--b", b) == 0
    printed = capsys.readouterr().out
    assert f"96: text equal (35 bytes); token ids not compared ({says})" in printed
    assert "compared: text only" in printed and "token ids equal" not in printed


# --- what an endpoint says of its cache -------------------------------------------------------------------------------


def caching(tokens, uncached=0):
    """A server that reports so many cached tokens of the prompt with a part to be cached, and of the others."""

    def change(choice, answer):
        details = {"cached_tokens": tokens if answer["usage"]["prompt_tokens"] > 200 else uncached}
        answer["usage"]["prompt_tokens_details"] = {"other": 1} if tokens is None else details

    return edited(change)


@pytest.mark.parametrize(
    ("b", "says"),
    [
        (caching(144), ""),
        (caching(128), ""),
        (caching(16), "only 16 of about 144 tokens cached at B"),
        (caching(0), "NOT cached at B"),
        (caching(128, uncached=64), "B had 64 tokens cached under a new salt: it ignores cache_salt"),
        (caching(None), ""),
        (edited(lambda choice, answer: answer["usage"].update(prompt_tokens_details=None)), ""),
        (edited(lambda c, answer: answer["usage"].update(prompt_tokens_details={"cached_tokens": None})), ""),
    ],
    ids=range(8),
)
def test_what_was_cached_is_said_and_what_is_unknown_stays_unknown(monkeypatch, capsys, b, says):
    with serving(caching(144)) as first, serving(b) as second:
        assert status(monkeypatch, "--a", first, "--b", second) == 0
    printed = capsys.readouterr().out
    for sentence in ("cached at A", "A had"):
        assert sentence not in printed
    assert says in printed and ("cached at B" in printed or "B had" in printed) is bool(says)


# --- time -------------------------------------------------------------------------------------------------------------


@contextmanager
def raw(drip):
    """A server that sends what `drip` yields, a piece every 50 ms, to everybody."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=send, args=(connection,), daemon=True).start()

    def send(connection):
        with connection:
            try:
                connection.recv(65536)
                for piece in drip():
                    connection.sendall(piece)
                    time.sleep(0.05)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.close()


def headers():
    yield b"HTTP/1.1 200 OK\r\nX: "
    while True:
        yield b"x"


def informational():
    while True:
        yield b"HTTP/1.1 103 Early Hints\r\n\r\n"


def body():
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    while True:
        yield b" "


@pytest.mark.parametrize("drip", [headers, informational, body])
def test_a_request_has_one_deadline_from_connect_to_the_last_byte(drip):
    with raw(drip) as slow, serving(openai(stub)) as b:
        result = compare.run(Endpoint("A", slow, timeout=0.5), Endpoint("B", b))  # it would never end
    assert "endpoint A" in result.error and "no whole answer within 0.5 s: raise --timeout" in result.error


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 1e308, float("nan"), 0, -1])
def test_a_timeout_that_no_clock_counts_is_refused_at_the_door(timeout):
    with pytest.raises(UserError, match="--timeout .* seconds between 0 and 86400"):
        Endpoint("A", "http://localhost:1", timeout)


def test_it_runs_inside_an_event_loop_as_in_a_notebook():
    import asyncio

    async def cell():
        with serving(openai(stub)) as a:
            return Endpoint("A", a).models()

    assert asyncio.run(cell()) == ["tiny"]


# --- proxies and certificates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"NO_PROXY": "localhost,[::1],fe80::1", "HTTP_PROXY": "http://127.0.0.1:1"},
        {"NO_PROXY": "::1", "ALL_PROXY": "socks5://127.0.0.1:1"},
        {"HTTP_PROXY": "http://127.0.0.1:1"},
        {"SSL_CERT_FILE": "/nowhere/certificates.pem"},
    ],
    ids=range(4),
)
def test_loopback_needs_neither_proxy_nor_certificates(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(openai(stub), openai(stub)).verdict == "equal"


ELSEWHERE = "http://gpu-host.invalid:8001"


def test_a_proxy_that_is_dead_is_named_and_not_the_endpoint(monkeypatch):
    proxy = f"http://me:secret@127.0.0.1:{closed_port()}"
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(UserError) as refusal:
        Endpoint("A", ELSEWHERE).models()
    assert f"through the proxy HTTP_PROXY={proxy.replace('me:secret@', '')}" in str(refusal.value)
    assert "secret" not in str(refusal.value) and "NO_PROXY" in str(refusal.value)


def test_what_a_proxy_answers_is_not_blamed_on_the_endpoint(monkeypatch):
    with serving(lambda path, body: (503, b"no route")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with pytest.raises(UserError, match=f"HTTP 503 'no route' through the proxy HTTP_PROXY={proxy}"):
            Endpoint("A", ELSEWHERE).models()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("HTTP_PROXY", "ftp://u:secret@h"),
        ("NO_PROXY", "a,[::1"),
        ("NO_PROXY", "::1"),
    ],
)
def test_proxy_settings_that_cannot_be_used_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HTTP_PROXY", value if name == "HTTP_PROXY" else f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(UserError) as refusal:
        Endpoint("A", ELSEWHERE).models()
    assert "_PROXY=" in str(refusal.value) and "secret" not in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_certificates_that_are_not_there_are_named(monkeypatch, name):
    monkeypatch.setenv(name, "/nowhere/certificates.pem")
    with pytest.raises(UserError, match=f"{name}=/nowhere/certificates.pem: there is no such file"):
        Endpoint("A", "https://gpu-host.invalid")


# --- names and passwords ----------------------------------------------------------------------------------------------

HOSTS = ["a..b", "x" * 64, "a." * 200 + "b", "xn--", "\ud800", "é" * 200, "a b", "..", "xn--" + "a" * 70]


@pytest.mark.parametrize("host", HOSTS, ids=range(len(HOSTS)))
def test_a_name_that_no_host_can_have_is_one_line(host):
    with pytest.raises(UserError) as refusal:
        Endpoint("B", f"http://{host}:8000").models()
    assert "endpoint B" in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    assert str(refusal.value).endswith("say http://host:port"), "refused at the door, and not by a resolver"
    str(refusal.value).encode()


@pytest.mark.parametrize(
    "url",
    [
        "u:secret@h",
        "ftp://u:secret@h",
        "http://u:secret@",
        "http://u:secret@h:99999999",
        "http://u:se/cret@h",
        "//u:secret@h",
    ]
    + ["http://u:secret@a..b", "http://u:secret@[::1"],
)
def test_a_password_is_never_printed(url, monkeypatch, capsys):
    assert status(monkeypatch, "--a", "http://localhost:1", "--b", url) == 2
    assert status(monkeypatch, "--a", url, "--b", url) == 2
    printed = capsys.readouterr()
    assert "secret" not in printed.err + printed.out and "cret@" not in printed.err


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1", "http://[::1]:8000"),
        ("http://me:secret@h:8000", "http://you:other@h:8000"),
        ("http://H.example", "http://h.example.:80/v1/"),
    ],
)
def test_two_names_of_one_server_are_refused(a, b):
    with pytest.raises(UserError, match="are one server") as refusal:
        compare.main(a, b)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8001"),
        ("http://h/a", "http://h/b"),
        ("http://h", "https://h"),
        ("http://10.0.0.1:8000", "http://10.0.0.2:8000"),
    ],
)
def test_two_servers_are_two(a, b):
    assert not address.same_server(*(address.base_url("A", one) for one in (a, b)))


def test_an_address_keeps_its_path_and_loses_the_rest():
    assert address.base_url("A", "http://h:8000/x/v1/?a=b#c") == httpx.URL("http://h:8000/x/v1")
