"""compare.py against servers on loopback: a checkpoint at DCP1 and DCP2, servers that differ, answers in a file."""

import json
import math
import sys
from random import Random

import pytest
import torch

from dcp_fix import broken, cli
from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.compare import answers, compare, endpoint, prompts
from dcp_fix.compare.answers import Completion, EndpointError
from dcp_fix.compare.endpoint import Endpoint
from dcp_fix.engine.engine import Generation
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.tiny import corpus
from tests.checkpoints import random_checkpoint
from tests.serve import MODEL, engine_answers, openai, serving

SHORT = {"96": (96, 3, 0), "160": (160, 4, 0), "128+96": (224, 5, 128)}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short prompts and short answers."""
    monkeypatch.setattr(prompts, "CLASSES", SHORT)
    for module in (answers, endpoint, prompts):
        monkeypatch.setattr(module, "NEW_TOKENS", 12)


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
    """An engine that knows one sentence of nine tokens."""
    tokens = corpus.encode("the oak key opens the vault lock . <end>".split())[:max_tokens]
    logits = torch.zeros(len(tokens), len(corpus.WORDS))
    return Generation(tokens, logits.scatter(1, torch.tensor(tokens)[:, None], 5.0), 0)


def edited(change):
    """The reply of a stub whose whole answers, not those of one token, go through `change(choice, usage)`."""

    def changed(path, body):
        status, answer = openai(stub)(path, body)
        if status == 200 and body and body["max_tokens"] > 1:
            change(answer["choices"][0], answer["usage"])
        return status, answer

    return changed


def set_to(usage=None, **choice):
    """A server whose answers have these fields."""
    return edited(lambda its_choice, its_usage: (its_choice.update(choice), its_usage.update(usage or {})))


def run(a, b):
    """What compare finds out about servers with replies `a` and `b`."""
    with serving(a) as first, serving(b) as second:
        return compare.run(Endpoint("A", first), Endpoint("B", second))


def refused(a, b):
    """The one line that ends a comparison."""
    with pytest.raises(EndpointError) as refusal:
        run(a, b)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 700
    return str(refusal.value)


# --- the real thing ---------------------------------------------------------------------------------------------------


def test_dcp2_answers_what_dcp1_answers(model, at_dcp1):
    with engine_answers(model, dcp_size=2) as answer:
        result = run(at_dcp1, openai(answer))
    assert (result.verdict, result.model) == ("equal", MODEL)
    assert [row.prompt.name for row in result.rows] == list(SHORT)
    for row in result.rows:
        tokens, _, cached = SHORT[row.prompt.name]
        assert row.a.encoded == row.b.encoded and row.a.ids == row.b.ids and len(set(row.a.ids)) > 4
        assert row.a.prompt_tokens == row.b.prompt_tokens == pytest.approx(tokens, abs=1)
        assert row.a.cached_tokens == row.b.cached_tokens == cached
        assert row.logprobs.count == 12 and row.logprobs.largest < 0.1 and row.logprobs.missing is None


@pytest.mark.parametrize("ops", [{"route": broken.attend_unrouted}, {"norm_rope": broken.norm_rope_skip_dense_rows}])
def test_a_defect_is_a_difference_and_where_it_begins(model, at_dcp1, ops):
    with engine_answers(model, 2, Ops(**ops)) as answer:
        result = run(at_dcp1, openai(answer))
    assert (result.verdict, len(result.rows)) == ("different", 3)
    for row in result.rows:
        at, byte = row.token_difference, row.text_difference
        assert row.a.ids[:at] == row.b.ids[:at] and row.a.ids[at] != row.b.ids[at]
        assert row.a.encoded[:byte] == row.b.encoded[:byte] and row.a.encoded[byte] != row.b.encoded[byte]
        assert row.logprobs.count == at


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_cached_part_goes_first_under_the_salt_of_its_prompt_and_no_other(capsys):
    asked = []
    result = run(lambda path, body: (asked.append(body), openai(stub)(path, body))[1], openai(stub))
    bodies = asked[1:]  # after the models
    plain, other, cached = (row.prompt for row in result.rows)
    assert cached.text.startswith(cached.prefix + " ") and len(cached.prefix.split()) == 128 + 16
    assert [b["prompt"] for b in bodies] == [plain.text] * 2 + [other.text] * 2 + [cached.prefix, cached.text] * 2
    salts = [body["cache_salt"] for body in bodies]
    assert salts[4] == salts[5] and salts[6] == salts[7] and len(set(salts)) == 6
    for body in bodies:
        assert body["temperature"] == 0 and body["repetition_penalty"] == 1.0 and body["logprobs"] == 1
        assert body["max_tokens"] == (1 if body["prompt"] == cached.prefix else 12)
        assert "seed" not in body  # a seed would let a sampler pass for greedy
    assert "B: 128+96, the part to be cached\nB: 128+96\n" in capsys.readouterr().err


def test_prompts_have_the_words_of_their_class_and_pairs_take_the_classes_in_turn(monkeypatch):
    monkeypatch.undo()
    made = prompts.prompts()
    assert [prompt.name for prompt in made] == ["512", "1536", "1024+1536"]
    assert [len(p.text.split()) for p in made] == [512, 1536, 2560]
    assert [len(p.prefix.split()) for p in made] == [0, 0, 1040]
    assert all(p.text.isascii() and "<" not in p.text and p.text.endswith(" :") for p in made)
    more = prompts.prompts(5)
    assert more[:3] == made and [p.name for p in more[3:]] == ["512 #1", "1536 #1"]
    assert len({p.digest for p in more}) == 5


def test_an_endpoint_that_fails_over_logprobs_is_asked_without():
    def fails(path, body):  # vLLM's answer when a logprob is NaN, or when it was told to offer none
        return (400, b"NaN") if body and "logprobs" in body else openai(stub)(path, body)

    result = run(openai(stub), fails)
    assert result.verdict == "equal" and result.rows[0].logprobs.missing == "B offers none"
    assert "HTTP 400 'NaN'" in refused(openai(stub), lambda path, body: (400, b"NaN"))


# --- what is found ----------------------------------------------------------------------------------------------------

IDS = stub([], 12, "").tokens
EDITS = {
    "no ids": (set_to(token_ids=None), "equal", None, None),
    "other text, no ids": (set_to(token_ids=None, text=" the oak key opens the vauxt"), "different", 26, None),
    "other ids": (set_to(token_ids=[*IDS[:-1], corpus.BOS]), "different", None, 8),
    "33 ids for 32 tokens": (set_to(token_ids=[*IDS, 1], usage={"completion_tokens": 9}), "equal", None, None),
    "no ids beside a text": (set_to(token_ids=[]), "equal", None, None),
    "one silent": (set_to(text="", token_ids=[corpus.END], logprobs=None), "different", 0, 0),
}


@pytest.mark.parametrize("case", EDITS)
def test_text_and_ids_decide_and_ids_only_where_they_are_those_of_the_answer(case):
    reply, verdict, text, token = EDITS[case]
    result = run(openai(stub), reply)
    assert result.verdict == verdict
    assert {(row.text_difference, row.token_difference) for row in result.rows} == {(text, token)}


def said(logprobs, text="a b c", ids=(5, 6, 7), **fields):
    return Completion(
        text=text, token_ids=ids and list(ids), finish_reason="stop", prompt_tokens=9, logprobs=logprobs, **fields
    )


NAN, LARGE = math.nan, 1.7e308
SAME, FOUR, TWO = [-1.0, -2.0, -3.0], [None, -1.0, -2.0, -3.0], [-1.0, -2.0]


@pytest.mark.parametrize(
    ("a", "b", "equal", "found"),
    [
        (said(SAME), said([-1.0, -2.25, -3.0]), True, (3, 0.25, 0, None)),
        (said(SAME), said([-1.0, NAN, -3.0]), False, (3, 0.0, 1, None)),
        (said([NAN, -2.0, -3.0]), said([-1.0, NAN, -3.0]), False, (3, 0.0, 2, None)),
        (said([None, -2.0, -3.0]), said([NAN, -2.0, -3.0]), True, (3, 0.0, 0, None)),
        (said([LARGE] * 3), said([-LARGE] * 3), True, (3, math.inf, 0, None)),
        (said(SAME), said(FOUR), True, (0, 0.0, 0, "B offers 4 for 3 tokens")),
        (said([*SAME, None]), said(SAME), True, (0, 0.0, 0, "A offers 4 for 3 tokens")),
        (said(SAME), said(TWO), True, (0, 0.0, 0, "B offers 2 for 3 tokens")),
        (said(SAME, ids=None), said(FOUR, ids=None), True, (0, 0.0, 0, "3 of A and 4 of B")),
        (said(SAME), said(FOUR, ids=(5, 6, 8, 9), text="a b d e"), False, (2, 1.0, 1, None)),
        (said(SAME), said(SAME, text="a b d", ids=None), False, (0, 0.0, 0, "no token in common")),
        (said(SAME), said(SAME, text="x", ids=(1, 2, 3)), False, (0, 0.0, 0, "no token in common")),
    ],
)
def test_logprobs_may_differ_but_not_be_no_number_on_one_side_and_lists_are_never_cut(a, b, equal, found):
    row = compare.row(prompts.Prompt("512", "what"), a, b)
    logprobs = row.logprobs
    assert row.equal is equal
    assert (logprobs.count, logprobs.largest, logprobs.one_sided, logprobs.missing) == found


# --- what cannot be compared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("both", "says"),
    [
        (
            edited(lambda choice, usage: choice.pop("finish_reason")),
            "no completion: lacks finish_reason; allowed: a word",
        ),
        (set_to(finish_reason=None), "finish_reason 'None': nothing to compare"),
        (
            set_to(finish_reason="abort", usage={"completion_tokens": 5}),
            "96 after 5 of 12 tokens, finish_reason 'abort'",
        ),
        (set_to(finish_reason="\x1b[2J"), "finish_reason '\\\\x1b[2J'"),
        (set_to(finish_reason="length"), "96 after 9 of 12 tokens: does it limit answers by itself?"),
        (set_to(token_ids=IDS + IDS), "96 after 18 of 12 tokens: does it limit answers by itself?"),
        (set_to(text="", token_ids=[corpus.END]), "no text at all: nothing to compare"),
        (lambda path, body: (503, b"loading"), "HTTP 503 'loading': see the server's log"),
        (lambda path, body: (200, b"[" * 100_000), "not JSON"),
        (lambda path, body: (200, {"data": []}), "no list of models"),
    ],
    ids=range(10),
)
def test_two_answers_that_prove_nothing_are_not_compared(both, says):
    assert says in refused(both, both)


def test_two_models_and_two_tokenizers_cannot_be_compared():
    error = refused(openai(stub, ["glm\x1b[2J", "alias"]), openai(stub, ["llama"]))
    assert "wrong model: glm\\x1b[2J at" in error and "llama" in error
    assert run(openai(stub), openai(stub, ["other", MODEL])).model == MODEL
    longer = edited(lambda choice, usage: usage.update(prompt_tokens=98))
    assert "wrong model: one prompt is 97 tokens at endpoint A" in refused(openai(stub), longer)


def test_a_server_that_contradicts_itself_in_text_or_ids_is_found_by_asking_twice():
    turns = iter(range(99))
    samples = edited(lambda choice, usage: choice.update(text=f"answer {next(turns)}"))
    error = refused(samples, openai(stub))
    assert "endpoint A" in error and "is not greedy: asked 96 twice" in error and "'answer 0', then 'answer 1'" in error
    other_ids = edited(lambda choice, usage: choice.update(token_ids=[*IDS[:-1], next(turns)]))
    assert "endpoint B" in (error := refused(openai(stub), other_ids)) and "not greedy" in error


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def status(monkeypatch):
    """The exit status of `dcp-fix compare ...` in this process."""

    def of(*arguments):
        monkeypatch.setattr(sys, "argv", ["dcp-fix", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0

    return of


def test_a_difference_is_printed_and_is_exit_status_1(status, capsys, tmp_path):
    garbage = set_to(text="\x1b[2Jlock lock", token_ids=[corpus.ID["lock"]] * 2, logprobs=None)
    with serving(openai(stub)) as a, serving(garbage) as b:
        assert status("--a", f"{a}/v1/", "--b", b, "--json", tmp_path / "c.json") == 1
    printed = capsys.readouterr().out
    assert "96: text differs at byte 0; token ids differ at token 0; logprobs not compared (B offers none)" in printed
    assert "\x1b" not in printed and "\\x1b[2Jlock lock" in printed
    assert equality.digest(b"\x1b[2Jlock lock")[:16] in printed
    assert "Different: 0 of 3 prompts are answered alike." in printed
    written = json.loads((tmp_path / "c.json").read_text())
    assert (written["verdict"], written["model"], written["a"]) == ("different", MODEL, f"endpoint A ({a}/v1)")
    assert [row["b"]["text"] for row in written["rows"]] == ["\x1b[2Jlock lock"] * 3


def test_equality_says_what_it_rests_on_and_json_has_no_infinity(status, capsys):
    far = set_to(token_ids=None, logprobs={"token_logprobs": [-LARGE] * 9})
    with serving(set_to(logprobs={"token_logprobs": [LARGE] * 8 + [NAN]})) as a, serving(far) as b:
        assert status("--a", a, "--b", b, "--json", "-") == 1
    written = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert written["rows"][0]["logprobs"] == {"count": 9, "largest": "inf", "one_sided": 1, "missing": None}
    assert written["rows"][0]["a"]["logprobs"][-1] is None
    with serving(openai(stub)) as a, serving(set_to(token_ids=None)) as b:
        assert status("--a", a, "--b", b) == 0
    printed = capsys.readouterr().out
    assert "96: text equal (35 bytes); token ids not compared (B offers none); logprobs of 9 tokens" in printed
    assert "Equal: 3 of 3 prompts" in printed and "225 tokens sent (0 cached)" in printed


def test_what_cannot_be_asked_is_one_line_and_exit_status_2(status, capsys, tmp_path):
    path = tmp_path / "x.json"
    with serving(openai(stub)) as a:
        for options, says in {
            (): "give --b URL to compare with, or --save FILE",
            ("--b", "http://localhost:2", "--save", path): "not both",
            ("--save", path, "--json", tmp_path / "c.json"): "without --json",
            ("--b", path): "x.json: no such file; make it with",
            ("--b", "http://127.0.0.1:1"): "endpoint B (http://127.0.0.1:1/v1): no connection",
            ("--b", a): "are one: whatever it answers equals itself",
            ("--b", a, "--json", tmp_path): "is a folder",
            ("--b", a, "--pairs", "2"): "--pairs",
        }.items():
            assert status("--a", a, *options) == 2
            (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert says in error
    assert list(tmp_path.iterdir()) == []


# --- one server at a time ---------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path, status):
    """Keeps the answers of a server, and gives the file."""

    def keep(reply, *options):
        path = tmp_path / "dcp1.json"
        with serving(reply) as a:
            assert status("--a", a, "--save", path, *options) == 0
        return path

    return keep


def test_answers_that_were_kept_are_compared_as_if_both_servers_ran(kept, status, capsys):
    path = kept(set_to(logprobs={"token_logprobs": [None] * 9}))
    assert "answers kept in" in capsys.readouterr().out
    with serving(set_to(logprobs={"token_logprobs": [None] * 9})) as b:
        assert status("--a", path, "--b", b) == 0
    with serving(openai(stub)) as b:
        assert status("--a", b, "--b", path) == 1  # numbers there, none in the file
        assert status("--a", path, "--save", path) == 2
        assert status("--a", path, "--b", path) == 2  # itself
    assert "Equal: 3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"finish_reason": "abort"}, {"token_ids": [1] * 13}, {"completion_tokens": 13}])
def test_saved_answers_are_held_to_what_live_ones_are(kept, status, capsys, change):
    path = kept(openai(stub))
    content = json.loads(path.read_text())
    for twice in content["answers"].values():
        twice["again"] |= change
    path.write_text(json.dumps(content))
    with serving(openai(stub)) as b:
        assert status("--a", path, "--b", b) == 2
    assert "error: the saved answers of endpoint A" in (said := capsys.readouterr().err) and " of 12 tokens" in said


def test_other_prompts_sampling_pairs_and_models_are_refused(kept, status, capsys, monkeypatch):
    path = kept(openai(stub))
    with serving(openai(stub, ["llama"])) as b:
        assert status("--a", path, "--b", b) == 2
    with serving(openai(stub)) as b:
        assert status("--a", path, "--b", b, "--pairs", 5) == 2
        monkeypatch.setitem(prompts.SAMPLING, "temperature", 1)
        assert status("--a", path, "--b", b) == 2
    said = capsys.readouterr().err
    assert "wrong model" in said and "512" not in said
    assert (
        "96 #1 was asked otherwise; save them anew, with the same --pairs" in said and "96 was asked otherwise" in said
    )


DAMAGE = {
    "{": "not a whole JSON file",
    '{"model": NaN}': "not a whole JSON file (NaN is no JSON)",
    "[]": "the file is []; allowed: an object",
    '{"format": "dcp-fix compare, answers 1"}': 'format is "dcp-fix compare, answers 1"; allowed: "',
    '{"answers": {"x": {"again": {"text": 3}}}}': "answers.x.again.text is 3; allowed: text",
}


@pytest.mark.parametrize("text", DAMAGE, ids=range(len(DAMAGE)))
def test_a_file_that_is_none_is_named_with_its_field(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError) as refusal:
        answers.load(tmp_path / "x.json")
    assert any(line.startswith(f"{tmp_path / 'x.json'}: {DAMAGE[text]}") for line in str(refusal.value).split("\n"))


# --- the paired test --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "p"),
    [((0, 0), 1.0), ((0, 3), 1.0), ((4, 0), 1 / 16), ((5, 0), 1 / 32), ((5, 2), 29 / 128), ((9, 1), 11 / 1024)],
)
def test_mcnemar_by_hand(votes, p):
    assert compare.mcnemar(*votes) == p


def noisy(share, seed, change=lambda text: text):
    """A server that gets a word wrong in that share of its answers."""
    random = Random(seed)

    def edit(choice, usage):
        choice |= {"text": change(choice["text"]), "token_ids": None, "logprobs": None}
        if random.random() < share:
            choice["text"] += f" {random.randrange(99)}"

    return edited(edit)


def other_word(text):
    return text.replace("vault", "cellar")


@pytest.mark.parametrize(
    ("share", "change", "exit_status", "verdict"),
    [(0.3, str, 0, "within noise"), (0.1, other_word, 1, "different")],
)
def test_noise_is_told_from_a_difference(kept, status, capsys, tmp_path, share, change, exit_status, verdict):
    path = kept(noisy(share, 1), "--pairs", 20)
    with serving(noisy(share, 2, change)) as b:
        assert status("--a", path, "--b", b, "--pairs", 20, "--json", tmp_path / "c.json") == exit_status
    written, printed = json.loads((tmp_path / "c.json").read_text()), capsys.readouterr().out
    assert written["verdict"] == verdict and len(written["rows"]) == 20
    assert verdict.capitalize() in printed and "McNemar p = " in printed
    assert (compare.mcnemar(*written["votes"]) < 0.05) is (verdict == "different")
    assert any(row["noisy"] for row in written["rows"])
