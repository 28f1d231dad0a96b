"""compare.py and endpoint.py against servers on loopback: a checkpoint at DCP1 and DCP2, and servers with faults."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dcp_fix import broken, cli
from dcp_fix.base import equality, output
from dcp_fix.base.errors import UserError, shown
from dcp_fix.compare import ask, compare, endpoint
from dcp_fix.compare import report as compare_report
from dcp_fix.compare.endpoint import Completion, Endpoint
from dcp_fix.engine.engine import Generation
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.tiny import corpus
from tests.checkpoints import random_checkpoint
from tests.serve import MODEL, engine_answers, openai, serving

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"96": (96, 3, 0), "160": (160, 4, 0), "128+96": (224, 5, 128)}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short prompts, short waits, and no proxy between this process and itself."""
    monkeypatch.setattr(ask, "CLASSES", SHORT)
    monkeypatch.setattr(ask, "NEW_TOKENS", 12)
    monkeypatch.setattr(endpoint, "WAITS", (0.01, 0.02, 0.03))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights over the words of the corpus; every prompt here takes the dense prefill."""
    sizes = {"vocab_size": len(corpus.WORDS), "index_topk": 512}
    return Model.load(random_checkpoint(tmp_path_factory.mktemp("checkpoint"), **sizes))


@pytest.fixture(scope="module")
def at_dcp1(model):
    with engine_answers(model) as answer:
        yield openai(answer)


def stub(ids, max_tokens, salt):
    """An engine that knows one sentence."""
    tokens = corpus.encode("the oak key opens the vault lock . <end>".split())[:max_tokens]
    logits = torch.zeros(len(tokens), len(corpus.WORDS))
    return Generation(tokens, logits.scatter(1, torch.tensor(tokens)[:, None], 5.0), 0)


def edited(change, reply=None):
    """The reply of a stub, or of `reply`, whose completions go through `change(choice, answer)`."""
    reply = reply or openai(stub)

    def changed(path, body):
        status, answer = reply(path, body)
        if status == 200 and "choices" in answer:
            change(answer["choices"][0], answer)
        return status, answer

    return changed


def counted(reply):
    """The reply, and the list of (path, body) that it was asked."""
    asked = []

    def counting(path, body):
        asked.append((path, body))
        return reply(path, body)

    return counting, asked


def run(a, b, **options):
    """What compare finds out about servers with replies `a` and `b`."""
    with serving(a) as first, serving(b) as second:
        return compare.run(Endpoint("A", first, **options), Endpoint("B", second, **options))


def refused(a, b, **options):
    """The error that ends a comparison, after no row."""
    result = run(a, b, **options)
    assert result.verdict == "cannot compare" and result.rows == []
    return result.error


# --- the real thing ---------------------------------------------------------------------------------------------------


def test_dcp2_answers_what_dcp1_answers(model, at_dcp1):
    with engine_answers(model, dcp_size=2) as answer:
        result = run(at_dcp1, openai(answer))
    assert (result.verdict, result.error, result.model) == ("equal", None, MODEL)
    assert result.compared == "text and token ids"
    assert [row.prompt.name for row in result.rows] == list(SHORT)
    for row in result.rows:
        tokens, _, cached = SHORT[row.prompt.name]
        assert row.a.encoded == row.b.encoded and row.a.token_ids == row.b.token_ids
        assert len(row.a.text.split()) == len(row.a.token_ids) == ask.NEW_TOKENS
        assert len(set(row.a.token_ids)) > 8
        assert row.a.prompt_tokens == row.b.prompt_tokens == pytest.approx(tokens, abs=1)
        assert row.a.cached_tokens == row.b.cached_tokens == cached
        assert row.logprobs.count == ask.NEW_TOKENS and row.logprobs.largest < 0.1
        assert row.logprobs.not_numbers == (0, 0)


def test_an_attention_without_combine_is_different(model, at_dcp1):
    with engine_answers(model, 2, Ops(route=broken.attend_unrouted)) as answer:
        result = run(at_dcp1, openai(answer))
    assert (result.verdict, result.error, len(result.rows)) == ("different", None, 3)
    for row in result.rows:
        assert not row.equal
        assert row.token_difference == equality.first_difference(row.a.token_ids, row.b.token_ids) >= 1
        assert row.a.encoded[: row.text_difference] == row.b.encoded[: row.text_difference]
        assert row.a.encoded[: row.text_difference + 1] != row.b.encoded[: row.text_difference + 1]
        assert row.logprobs.count == row.token_difference


def test_k_rows_that_nobody_wrote_are_different(model, at_dcp1):
    with engine_answers(model, 2, Ops(norm_rope=broken.norm_rope_skip_dense_rows)) as answer:
        result = run(at_dcp1, openai(answer))
    assert (result.verdict, result.error) == ("different", None)
    assert len(result.rows) == 3 and not any(row.equal for row in result.rows)


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_cached_part_goes_first_under_the_salt_of_its_prompt_and_no_other():
    reply, asked = counted(openai(stub))
    result = run(reply, openai(stub))
    assert result.verdict == "equal"
    bodies = [body for _, body in asked[2:]]  # after the models and the counting
    prompt = {row.prompt.name: row.prompt for row in result.rows}
    cached = prompt["128+96"]
    assert cached.text.startswith(cached.prefix + " ") and len(cached.prefix.split()) == 128 + 16 - 1
    texts = [prompt["96"].text] * 2 + [prompt["160"].text] * 2 + [cached.prefix, cached.text] * 2
    assert [body["prompt"] for body in bodies] == texts
    salts = [body["cache_salt"] for body in bodies]
    assert salts[4] == salts[5] and salts[6] == salts[7] and len(set(salts)) == 6
    for body in bodies:
        assert body["temperature"] == 0 and body["repetition_penalty"] == 1.0 and body["logprobs"] == 1
        assert body["max_tokens"] == (1 if body["prompt"] == cached.prefix else ask.NEW_TOKENS)
        assert "seed" not in body  # a seed would let a sampler pass for greedy


@pytest.mark.parametrize("ratio", [1.0, 0.8])
def test_prompts_have_the_tokens_of_their_class(monkeypatch, ratio):
    monkeypatch.undo()
    made = ask.prompts(ratio)
    assert [prompt.name for prompt in made] == ["512", "1536", "1024+1536"]
    assert [len(p.text.split()) for p in made] == [round(n * ratio) for n in (512, 1536, 2560)]
    assert [len(p.prefix.split()) for p in made] == [0, 0, round(1040 * ratio)]
    assert all(p.text.isascii() and "<" not in p.text and p.text.endswith(" :") for p in made)
    assert made == ask.prompts(ratio)


def test_prompts_are_sized_by_the_tokens_that_the_endpoint_counts(monkeypatch):
    def more(choice, answer):
        answer["usage"]["prompt_tokens"] *= 2

    monkeypatch.setattr(ask, "CLASSES", {"a": (256, 3, 0), "b": (512, 3, 128)})
    result = run(edited(more), edited(more))
    assert [row.a.prompt_tokens for row in result.rows] == pytest.approx([256, 512], abs=4)
    assert [len(row.prompt.text.split()) for row in result.rows] == pytest.approx([128, 256], abs=2)
    assert len(result.rows[1].prompt.prefix.split()) == pytest.approx((128 + 16) / 2, abs=1)


def test_progress_is_called_before_every_request():
    reply, asked = counted(openai(stub))
    seen = []
    with serving(reply) as a, serving(reply) as b:
        compare.run(Endpoint("A", a), Endpoint("B", b), lambda what: seen.append((what, len(asked))))
    assert [count for _, count in seen] == list(range(len(asked))) and len(asked) == ask.requests() == 20
    assert seen[-1][0] == "B: 128+96, again"


# --- what is found ----------------------------------------------------------------------------------------------------


def test_text_alone_is_compared_where_one_offers_no_ids():
    result = run(openai(stub), edited(lambda choice, answer: choice.pop("token_ids")))
    assert (result.verdict, result.compared) == ("equal", "text only")
    assert all(row.token_difference is None and row.logprobs.count == 9 for row in result.rows)

    def other_text(choice, answer):
        del choice["token_ids"]
        choice["text"] = choice["text"].replace("vault", "vauxt")

    result = run(openai(stub), edited(other_text))
    assert result.verdict == "different"
    assert {row.text_difference for row in result.rows} == {len(" the oak key opens the vau")}
    assert result.rows[0].logprobs.missing == "no token in common"


def test_other_ids_under_the_same_text_are_different():
    def other_end(choice, answer):
        choice["token_ids"] = [*choice["token_ids"][:-1], corpus.BOS]

    result = run(openai(stub), edited(other_end))
    assert result.verdict == "different"
    assert {(row.text_difference, row.token_difference) for row in result.rows} == {(None, 8)}


def test_a_logprob_that_is_no_number_on_one_side_is_different():
    def not_a_number(choice, answer):
        choice["logprobs"]["token_logprobs"][0] = None  # how SGLang writes NaN

    result = run(openai(stub), edited(not_a_number))
    assert result.verdict == "different"
    assert result.rows[0].text_difference is result.rows[0].token_difference is None
    assert result.rows[0].logprobs.not_numbers == (0, 1) and not result.rows[0].logprobs.identical
    assert run(edited(not_a_number), edited(not_a_number)).verdict == "equal"


def test_logprobs_are_reported_and_may_differ():
    def lower(choice, answer):
        choice["logprobs"]["token_logprobs"][0] -= 0.25

    result = run(openai(stub), edited(lower))
    assert result.verdict == "equal"
    assert result.rows[0].logprobs.largest == pytest.approx(0.25) and not result.rows[0].logprobs.identical
    assert run(openai(stub), openai(stub)).rows[0].logprobs.identical


@pytest.mark.parametrize("status", [400, 500])
def test_an_endpoint_that_fails_over_logprobs_is_asked_without(status):
    plain = openai(stub)

    def fails(path, body):  # vLLM's answer when a logprob is NaN, or when it was told to offer none
        return (status, {"error": "out of range"}) if body and "logprobs" in body else plain(path, body)

    result = run(plain, fails)
    assert result.verdict == "equal"
    assert result.rows[0].logprobs.missing == f"B offers none (HTTP {status} when asked, as for NaN)"


# --- endpoints that cannot be compared --------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_dead_endpoint_is_named_with_its_address():
    dead = f"http://127.0.0.1:{closed_port()}"
    with serving(openai(stub)) as a:
        result = compare.run(Endpoint("A", a), Endpoint("B", dead))
    assert result.verdict == "cannot compare"
    assert f"endpoint B ({dead}/v1): no connection" in result.error and "tried 4 times" in result.error


def test_an_endpoint_that_dies_half_way_leaves_the_rows_before():
    reply, asked = counted(openai(stub))

    def dies(path, body):
        return (200, b"") if len(asked) > 5 else reply(path, body)

    result = run(openai(stub), dies)
    assert result.verdict == "cannot compare" and "endpoint B" in result.error
    assert [row.prompt.name for row in result.rows] == ["96", "160"]


def test_a_slow_endpoint_is_given_up_once_and_told_how_to_wait():
    def slow(path, body):
        time.sleep(0.6 if body else 0)
        return openai(stub)(path, body)

    reply, asked = counted(slow)
    error = refused(openai(stub), reply, timeout=0.3)
    assert "endpoint B" in error and "within 0.3 s" in error and "--timeout" in error and "tried" not in error
    assert len(asked) == 2


def test_an_answer_that_trickles_is_slow_too():
    sent = []

    def trickle(path, body):
        return 200, (time.sleep(0.05) or sent.append(piece) or b" " for piece in range(100))

    assert "within 0.3 s" in refused(trickle, openai(stub), timeout=0.3)
    assert len(sent) < 100  # given up on, not waited for to its end


def test_an_endless_answer_is_cut(monkeypatch):
    monkeypatch.setattr(endpoint, "LARGEST", 1000)
    reply, asked = counted(lambda path, body: (200, (b" " * 500 for _ in range(9))))
    assert "more than 1000 bytes" in refused(openai(stub), reply)
    assert len(asked) == 1, "it does not pass"


def test_two_models_cannot_be_compared():
    error = refused(openai(stub, ["glm", "alias"]), openai(stub, ["llama"]))
    assert "wrong model" in error and "glm, alias" in error and "llama" in error


def test_a_second_name_in_common_is_enough():
    result = run(openai(stub, ["alias", MODEL]), openai(stub, ["other", MODEL]))
    assert (result.verdict, result.model) == ("equal", MODEL)


def test_a_model_that_is_listed_and_not_served_is_refused_in_the_servers_words():
    lists = openai(stub, [MODEL])

    def unserved(path, body):
        return lists(path, body) if body is None else (404, {"error": {"message": "The model does not exist."}})

    reply, asked = counted(unserved)
    error = refused(openai(stub), reply)
    assert "HTTP 404" in error and "The model does not exist." in error
    assert len(asked) == 2, "404 does not pass"


def test_another_tokenizer_is_another_model():
    def longer(choice, answer):
        answer["usage"]["prompt_tokens"] += 1

    def other_ids(choice, answer):
        choice["prompt_token_ids"] = choice["prompt_token_ids"][::-1]

    error = refused(openai(stub), edited(longer))
    assert "wrong model" in error and "97 tokens" in error and "98" in error
    assert "wrong model" in refused(openai(stub), edited(other_ids))

    def longer_later(choice, answer):
        answer["usage"]["prompt_tokens"] += answer["usage"]["prompt_tokens"] > 200

    result = run(openai(stub), edited(longer_later))
    assert "wrong model" in result.error and [row.prompt.name for row in result.rows] == ["96", "160"]


def test_a_tokenizer_that_counts_out_of_reason_is_refused():
    def truncated(choice, answer):
        answer["usage"]["prompt_tokens"] = 16

    assert "16 tokens in 96 English words" in refused(edited(truncated), edited(truncated))


def test_a_sampler_is_found_by_asking_twice(model):
    generator = torch.Generator().manual_seed(0)

    with engine_answers(model) as greedy:

        def sampled(ids, max_tokens, salt):
            found = greedy(ids, max_tokens, salt)
            tokens = torch.multinomial((found.logits / 8).softmax(-1), 1, generator=generator)[:, 0].tolist()
            return Generation(tokens, found.logits, found.cached)

        error = refused(openai(sampled), openai(stub))
    assert "endpoint A" in error and "is not greedy" in error and "asked 96 twice" in error and "samples" in error


def test_ids_that_change_under_the_same_text_are_not_greedy_either():
    ends = iter(range(99))

    def change(choice, answer):
        choice["token_ids"] = [*choice["token_ids"][:-1], next(ends)]

    assert "endpoint B" in (error := refused(openai(stub), edited(change))) and "not greedy" in error


def test_two_empty_answers_prove_nothing():
    def silent(choice, answer):
        choice |= {"text": "", "token_ids": [corpus.END], "logprobs": None}

    assert "no text at all" in refused(edited(silent), edited(silent))
    assert run(openai(stub), edited(silent)).verdict == "different"


GARBAGE = [b"<html>busy</html>", b"{", b"[" * 100_000, [], {}, {"choices": []}, {"data": [{}]}, {"data": "ab"}, b"\xff"]


@pytest.mark.parametrize("answer", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_tried_again_and_then_quoted(answer):
    reply, asked = counted(lambda path, body: (200, answer))
    error = refused(openai(stub), reply)
    assert "endpoint B" in error and "tried 4 times" in error and len(error) < 500 and "\n" not in error
    assert len(asked) == 4


CHOICES = [
    ({"text": None}, "text is null; allowed: text"),
    ({"finish_reason": 3}, "finish_reason is 3; allowed: a word, or null"),
    ({"token_ids": "abc"}, 'token_ids is "abc"; allowed: a list of token ids, or null'),
    ({"token_ids": [1.5]}, "token_ids.0 is 1.5; allowed: a list of token ids"),
    ({"token_ids": [True]}, "token_ids.0 is true; allowed: a list of token ids"),
    ({"token_ids": [-1] * 10_000}, "token_ids.0 is -1; allowed: a list of token ids"),
    ({"token_ids": [1 << 70]}, "token_ids.0 is 1180591620717411303424; allowed"),
    ({"logprobs": [1]}, "logprobs is [1]; allowed: an object, or null"),
    ({"logprobs": {"token_logprobs": [10**400]}}, "logprobs.token_logprobs.0 is 1000"),
    ({"logprobs": {"token_logprobs": ["a"]}}, 'logprobs.token_logprobs.0 is "a"; allowed: a list of numbers'),
]


@pytest.mark.parametrize(("field", "says"), CHOICES, ids=range(len(CHOICES)))
def test_a_completion_of_another_shape_is_refused_by_its_field(field, says):
    def misshape(choice, answer):
        choice |= field

    assert f"no completion: choices.0.{says}" in refused(openai(stub), edited(misshape))


@pytest.mark.parametrize(
    ("usage", "says"),
    [
        (None, "usage is null; allowed: an object"),
        ({}, "lacks usage.prompt_tokens; allowed: a whole number"),
        ({"prompt_tokens": "97"}, 'usage.prompt_tokens is "97"; allowed: a whole number'),
        ({"prompt_tokens": 97, "completion_tokens": -1}, "usage.completion_tokens is -1; allowed: a whole number"),
        (
            {"prompt_tokens": 97, "prompt_tokens_details": {"cached_tokens": 0.5}},
            "usage.prompt_tokens_details.cached_tokens is 0.5; allowed: a whole number",
        ),
    ],
)
def test_counts_of_another_shape_are_refused_by_their_field(usage, says):
    assert f"no completion: {says}" in refused(openai(stub), edited(lambda choice, answer: answer.update(usage=usage)))


@pytest.mark.parametrize("bad", [(500, b"crash"), (503, b"loading"), (429, b"later"), (200, b"garbage")])
def test_what_passes_is_waited_for(bad):
    good, failures = openai(stub), iter([bad, bad, bad, None] * 99)
    reply, asked = counted(lambda path, body: next(failures) or good(path, body))
    result = run(good, reply)
    assert (result.verdict, result.error) == ("equal", None)
    assert len(asked) == 40, "three failures before each of ten answers"
    assert all(row.b.logprobs_refused is None for row in result.rows)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments, environment=None):
    """`dcp-fix compare ...` in a process of its own, with full-size prompts."""
    line = [sys.executable, "-m", "dcp_fix", "compare", *arguments]
    environment = os.environ | (environment or {})
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_writes_json_and_nothing_else_to_standard_output():
    with serving(openai(stub)) as a, serving(openai(stub)) as b:
        done = command("--a", a, "--b", f"{b}/v1/", "--json", "-")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert (written["verdict"], written["error"], written["model"]) == ("equal", None, MODEL)
    assert (written["a"], written["b"]) == (f"endpoint A ({a}/v1)", f"endpoint B ({b}/v1)")
    assert [row["prompt_class"] for row in written["rows"]] == ["512", "1536", "1024+1536"]
    assert [row["a"]["prompt_tokens"] for row in written["rows"]] == pytest.approx([512, 1536, 2560], abs=5)
    tokens = stub([], 99, "").tokens
    for row in written["rows"]:
        assert row["b"]["tokens_sha256"] == equality.digest(tokens)
        assert row["b"]["text_sha256"] == equality.digest(b" the oak key opens the vault lock .")
    assert "A: 512" in done.stderr and "B: 1024+1536, the part to be cached" in done.stderr


def status(monkeypatch, *arguments):
    """The exit status of `dcp-fix compare ...` in this process, with short prompts."""
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def test_a_difference_is_printed_and_is_exit_status_1(monkeypatch, capsys, tmp_path):
    def garbage(choice, answer):
        choice |= {"text": "\x1b[2Jlock [red]lock", "token_ids": [corpus.ID["lock"]] * 2}

    with serving(openai(stub)) as a, serving(edited(garbage)) as b:
        assert status(monkeypatch, "--a", a, "--b", b, "--json", tmp_path / "c.json") == 1
    printed = capsys.readouterr().out
    first, other = corpus.ID["the"], corpus.ID["lock"]
    assert f"96: text differs at byte 0; token ids differ at token 0 (A {first}, B {other})" in printed
    assert "\x1b" not in printed and "\\x1b[2Jlock [red]lock" in printed
    assert equality.digest([other] * 2)[:16] in printed
    assert "Different: 0 of 3 prompts are answered alike; compared: text and token ids." in printed
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "different"


def test_what_a_terminal_cannot_encode_is_escaped_after_the_json_is_there(tmp_path):
    snow = edited(lambda choice, answer: choice.update(text=choice["text"] + " \u2603"))
    with serving(snow) as a, serving(snow) as b:
        arguments = ["--a", a, "--b", b, "--json", tmp_path / "c.json"]
        done = command(*arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "\\u2603" in done.stdout and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "c.json").read_text())["rows"][0]["a"]["text"].endswith("\u2603")


def test_the_json_is_there_before_anything_is_printed_and_the_table_comes_whatever_became_of_it(
    monkeypatch, capsys, tmp_path
):
    path, printed = tmp_path / "c.json", []
    with serving(openai(stub)) as a, serving(openai(stub)) as b, monkeypatch.context() as patch:
        patch.setattr(compare_report, "show", lambda result: printed.append(json.loads(path.read_text())["verdict"]))
        assert status(monkeypatch, "--a", a, "--b", b, "--json", path) == 0
        assert printed == ["equal"]
        patch.undo()
        patch.setattr(output, "replace", lambda *values, **options: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert status(monkeypatch, "--a", a, "--b", b, "--json", path) == 2
    said = capsys.readouterr()
    assert "Equal: 3 of 3 prompts" in said.out and "c.json: cannot be written (No space left)" in said.err


def test_what_a_server_calls_its_model_reaches_no_terminal(monkeypatch, capsys):
    name = "glm\x1b]0;x\x07\x1b[2J"
    with serving(openai(stub, [name])) as a, serving(openai(stub, [name])) as b:
        assert status(monkeypatch, "--a", a, "--b", b) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "model glm\\x1b]0;x\\x07\\x1b[2J" in said.out
    assert "\x1b" not in refused(openai(stub, [name]), openai(stub, ["llama"]))


def test_equality_says_what_it_rests_on(monkeypatch, capsys):
    def no_ids(choice, answer):
        del choice["token_ids"], choice["logprobs"]

    with serving(openai(stub)) as a, serving(edited(no_ids)) as b:
        assert status(monkeypatch, "--a", a, "--b", b) == 0
    printed = capsys.readouterr().out
    assert "96: text equal (35 bytes); token ids not compared (B offers none); " in printed
    assert "logprobs not compared (B offers none)" in printed
    assert "Equal: 3 of 3 prompts are answered alike; compared: text only." in printed
    assert (
        printed.count("NOT cached at A") == printed.count("NOT cached at B") == 1
    )  # of the one prompt that has a cached part: the stub caches none


def test_what_cannot_be_compared_is_exit_status_2_with_one_line_and_whole_json(monkeypatch, capsys, tmp_path):
    with serving(openai(stub)) as a, serving(lambda path, body: (503, b"loading")) as b:
        assert status(monkeypatch, "--a", a, "--b", b, "--json", tmp_path / "c.json") == 2
    printed = capsys.readouterr()
    error = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert error == [f"error: endpoint B ({b}/v1): HTTP 503 'loading': see the server's log (tried 4 times)"]
    written = json.loads((tmp_path / "c.json").read_text())
    assert (written["verdict"], written["rows"], f"error: {written['error']}") == ("cannot compare", [], error[0])


def test_a_number_that_json_lacks_is_null(monkeypatch, tmp_path):
    def not_a_number(choice, answer):
        choice["logprobs"]["token_logprobs"][0] = math.nan  # json.dumps writes NaN, and json.loads takes it

    with serving(edited(not_a_number)) as a, serving(edited(not_a_number)) as b:
        assert status(monkeypatch, "--a", a, "--b", b, "--json", tmp_path / "c.json") == 0
    assert json.loads((tmp_path / "c.json").read_text())["rows"][0]["a"]["logprobs"][0] is None


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://[::1", "", "file:/etc/hosts"])
def test_an_address_that_is_none_is_refused_before_anything_is_asked(url):
    with pytest.raises(UserError, match="endpoint B"):
        compare.main("http://localhost:1", url)


def test_one_endpoint_twice_is_refused():
    with pytest.raises(UserError, match="name two endpoints"):
        compare.main("http://localhost:1", "http://localhost:1/v1/")


def test_bad_options_are_refused_before_anything_is_asked(monkeypatch, tmp_path):
    reply, asked = counted(openai(stub))
    with serving(reply) as a:
        ends = ["--a", a, "--b", "http://127.0.0.1:1"]
        assert status(monkeypatch, *ends[:2]) == 2
        assert status(monkeypatch, *ends, "--json", tmp_path) == 2
        assert status(monkeypatch, *ends, "--json", tmp_path / "no" / "c.json") == 2
        assert status(monkeypatch, *ends, "--timeout", "0") == 2
    assert asked == []


def test_a_password_in_an_address_is_not_printed():
    assert str(Endpoint("A", "http://me:secret@host:8000")) == "endpoint A (http://host:8000/v1)"


def test_text_is_shown_without_what_a_terminal_obeys():
    assert shown("a\x1b[31m\n\x9b\ud800é" + "x" * 99, 60) == ("a\\x1b[31m\\n\\x9b\\ud800é" + "x" * 99)[:57] + "..."
    lone = Completion(text="\ud800", prompt_tokens=1)
    assert equality.digest(lone.encoded) == equality.digest(b"\xed\xa0\x80")
