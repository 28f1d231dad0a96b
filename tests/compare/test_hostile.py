"""What lies between compare and a server: broken answers, drips, compression, names, passwords."""

import asyncio
import gzip
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.compare import answers, endpoint
from dcp_fix.compare.answers import EndpointError
from dcp_fix.compare.endpoint import Endpoint
from tests.compare.test_compare import status, stub  # noqa: F401 status is a fixture
from tests.json_values import VALUES, damaged
from tests.serve import openai, serving

pytestmark = pytest.mark.timeout(120)

# --- whatever a server answers ----------------------------------------------------------------------------------------

LOGPROBS = {"token_logprobs": [-0.5, -1.5]}
CHOICE = {"text": "a b", "token_ids": [5, 6], "logprobs": LOGPROBS, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
SOUND = {"choices": [CHOICE], "usage": USAGE}


@given(st.sampled_from([200, 200, 404, 503]), st.binary(max_size=60) | VALUES.map(json.dumps).map(str.encode))
def test_any_content_is_json_or_one_line(http_status, content):
    try:
        got = answers.json_of(http_status, content)
    except EndpointError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
    else:
        assert http_status == 200 and json.dumps(got) == json.dumps(json.loads(content))


@given(damaged(SOUND))
@example(SOUND | {"usage": {"prompt_tokens": -1}})
@example(SOUND | {"choices": [{"text": "a b", "token_ids": [5, 6]}]})
def test_any_answer_is_a_completion_as_it_is_or_one_line(answer):
    try:
        got = answers.completion(answer)
    except EndpointError as error:
        assert all(line.isprintable() for line in str(error).split("\n"))
        return
    choice, usage = answer["choices"][0], answer["usage"]
    assert (got.text, got.finish_reason) == (choice["text"], choice["finish_reason"])
    assert got.ids in (None, choice.get("token_ids")) and got.prompt_tokens == usage["prompt_tokens"]
    counts = [*(got.token_ids or []), got.prompt_tokens, got.cached_tokens or 0, got.tokens or 0]
    assert all(type(count) is int and count >= 0 for count in counts) and isinstance(got.encoded, bytes)


@given(damaged({"data": [{"id": "a"}, {"id": "b"}]}) | VALUES)
def test_any_list_of_models_is_names_or_one_line(answer):
    try:
        names = answers.model_names(answer)
    except EndpointError as error:
        assert str(error).isprintable()
    else:
        assert names == [card["id"] for card in answer["data"]] and all(isinstance(name, str) for name in names)


# --- time and size ----------------------------------------------------------------------------------------------------


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


def body():
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    while True:
        yield b" "


@pytest.mark.parametrize("drip", [headers, body])
def test_a_request_has_one_deadline_from_connect_to_the_last_byte(drip):
    with raw(drip) as slow, pytest.raises(UserError, match="endpoint A .*no whole answer within 0.5 s"):
        Endpoint("A", slow, timeout=0.5).models()  # it would never end


def compressed():
    """Short as it comes, and longer than is read once it is not."""
    content = gzip.compress(gzip.compress(bytes(1 << 20)))
    yield b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


def cut_short():
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"


@pytest.mark.parametrize(
    ("drip", "says"),
    [(compressed, "a compressed answer"), (body, "more than 5 bytes"), (cut_short, "the connection broke off")],
)
def test_an_answer_is_bounded_whatever_it_claims(monkeypatch, drip, says):
    monkeypatch.setattr(endpoint, "LARGEST", 5)
    with raw(drip) as address, pytest.raises(UserError, match=f"endpoint A .*{says}"):
        Endpoint("A", address).models()


def test_it_runs_inside_an_event_loop_as_in_a_notebook():
    async def cell():
        with serving(openai(stub)) as a:
            return Endpoint("A", a).models()

    assert asyncio.run(cell()) == ["tiny"]


# --- names and passwords ----------------------------------------------------------------------------------------------

NO_ADDRESS = ["h", "ftp://h", "http://", "http://[::1", "http://a b", "http://xn--", "http://\ud800", "file:/etc/hosts"]
NO_ADDRESS += ["http://u:secret@h:65536", "http://u:secret@h:-1", "http://u:secret@h%00:80", "http://u:secret@h%0d:80"]
NO_ADDRESS += ["http://u:secret@h/%00", "http://u:se/cret@h", "u:secret@h", "//u:secret@h", "http://u:secret@"]


@pytest.mark.parametrize("url", NO_ADDRESS, ids=range(len(NO_ADDRESS)))
def test_an_address_that_is_none_is_one_line_without_its_password(url, status, capsys):  # noqa: F811
    assert status("--a", "http://localhost:1", "--b", url) == 2
    printed = capsys.readouterr()
    assert "secret" not in printed.err + printed.out and "cret@" not in printed.err
    assert printed.err.startswith("error: endpoint B: ") and printed.err.endswith("say http://host:port\n")


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "127.0.0.1:1"])
@pytest.mark.parametrize("password", ["secret", "secret%00", "secret%0d"])
def test_a_server_that_is_not_there_is_one_line_without_its_password(host, password, status, capsys):  # noqa: F811
    assert status("--a", f"http://me:{password}@{host}", "--b", "http://localhost:2") == 2
    printed = capsys.readouterr()
    assert f"error: endpoint A (http://{host}/v1): no connection" in printed.err and "secret" not in printed.err
    assert "is it up, and is this its address?" in printed.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("http://localhost:8000/v1", "http://127.0.0.1:8000", True),
        ("http://127.0.0.1:8000", "http://[::1]:8000", True),
        ("http://127.0.0.1:8000", "http://0.0.0.0:8000", True),
        ("http://127.0.0.1:8000", "http://2130706433:8000", True),
        ("http://127.0.0.1:8000", "http://[::ffff:127.0.0.1]:8000", True),
        ("http://me:secret@h:8000", "http://you:other@h:8000", True),
        ("http://H.example", "http://h.example.:80/v1/", True),
        ("http://localhost:8000", "http://127.0.0.1:8001", False),
        ("http://h/a", "http://h/b", False),
        ("http://h", "https://h", False),
        ("http://10.0.0.1:8000", "http://10.0.0.2:8000", False),
    ],
)
def test_two_names_of_one_server_are_one(a, b, same):
    assert (Endpoint("A", a) == Endpoint("B", b)) is same


def test_an_address_keeps_its_path_and_shows_no_password():
    assert endpoint.base_url("A", "http://h:8000/x/v1/?a=b#c") == httpx.URL("http://h:8000/x/v1")
    assert str(Endpoint("A", "http://me:secret@host:8000")) == "endpoint A (http://host:8000/v1)"
