"""One server at a time: answers kept in a file. Noisy servers: a paired test with each server as its own control."""

import json
import math
import os
from random import Random
from types import SimpleNamespace

import pytest

from dcp_fix.base.errors import UserError
from dcp_fix.compare import ask, endpoint, pairs
from dcp_fix.compare.saved import Saved
from dcp_fix.tiny import corpus
from tests.compare.test_compare import SHORT, edited, status, stub
from tests.serve import openai, serving

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short prompts and short waits."""
    monkeypatch.setattr(ask, "CLASSES", SHORT)
    monkeypatch.setattr(ask, "NEW_TOKENS", 12)
    monkeypatch.setattr(endpoint, "WAITS", (0.01,))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keeps the answers of a server, and gives the file."""

    def keep(reply, *options):
        path = tmp_path / "dcp1.json"
        with serving(reply) as a:
            assert status(monkeypatch, "--a", a, "--save", path, *options) == 0
        return path

    return keep


def other_text(choice, answer):
    choice["text"] = choice["text"].replace("vault", "cellar")
    choice["token_ids"] = [*choice["token_ids"][:-1], corpus.BOS]


# --- a file in the place of an endpoint -------------------------------------------------------------------------------


def test_answers_that_were_kept_are_compared_as_if_both_servers_ran(kept, monkeypatch, capsys, tmp_path):
    path = kept(openai(stub))
    assert "answers kept in" in capsys.readouterr().out
    with serving(openai(stub)) as b:
        assert status(monkeypatch, "--a", path, "--b", b, "--json", tmp_path / "c.json") == 0
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["verdict"] == "equal" and len(written["rows"]) == 3 and written["paired"] is None
    assert f"{path} (answers of endpoint A (http://127.0.0.1:" in written["a"]
    with serving(edited(other_text)) as b:
        assert status(monkeypatch, "--a", path, "--b", b) == 1
        assert status(monkeypatch, "--a", b, "--b", path) == 1
    assert "Different: 0 of 3 prompts" in capsys.readouterr().out


def test_a_logprob_that_is_no_number_survives_the_file(kept, monkeypatch):
    def not_a_number(choice, answer):
        choice["logprobs"]["token_logprobs"][0] = None

    path = kept(edited(not_a_number))
    assert math.isnan(Saved.load("A", path).content.answers["96"].first.logprobs[0])
    with serving(edited(not_a_number)) as b:
        assert status(monkeypatch, "--a", path, "--b", b) == 0
    with serving(openai(stub)) as b:
        assert status(monkeypatch, "--a", path, "--b", b) == 1


def test_a_dash_keeps_the_answers_on_standard_output_and_nothing_else_is_there(monkeypatch, capsys, tmp_path):
    with serving(openai(stub)) as a:
        assert status(monkeypatch, "--a", a, "--save", "-") == 0
    (tmp_path / "x.json").write_text(capsys.readouterr().out)
    assert list(Saved.load("A", tmp_path / "x.json").content.answers) == list(SHORT)


def test_what_a_file_calls_its_endpoint_reaches_no_terminal(kept, monkeypatch, capsys):
    path = kept(openai(stub))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"endpoint": "\x1b[2Jx", "model": "tiny"}))
    with serving(openai(stub)) as b:
        assert status(monkeypatch, "--a", path, "--b", b) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "(answers of \\x1b[2Jx)" in said.out


def refusal(monkeypatch, capsys, path, reply=None, *options):
    """The line that ends a comparison with the file."""
    with serving(reply or openai(stub)) as b:
        assert status(monkeypatch, "--a", path, "--b", b, *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_another_model_another_tokenizer_and_other_prompts_are_refused(kept, monkeypatch, capsys):
    path = kept(openai(stub))
    assert "wrong model" in refusal(monkeypatch, capsys, path, openai(stub, ["llama"]))

    def longer(choice, answer):
        answer["usage"]["prompt_tokens"] += 1

    assert "wrong model" in refusal(monkeypatch, capsys, path, edited(longer))
    monkeypatch.setattr(ask, "MARGIN", ask.MARGIN + 1)
    assert "its prompt 128+96 is another one; save the answers anew" in refusal(monkeypatch, capsys, path)


def test_other_sampling_and_another_number_of_pairs_are_refused_before_anything_is_asked(kept, monkeypatch, capsys):
    path = kept(openai(stub))
    assert "saved without --pairs, and this comparison is --pairs 5" in refusal(
        monkeypatch, capsys, path, None, "--pairs", 5
    )
    monkeypatch.setattr(ask, "NEW_TOKENS", 13)
    assert "asked with other sampling" in refusal(monkeypatch, capsys, path)


DAMAGE = {
    "": "not a whole JSON file",
    "{": "not a whole JSON file",
    "[" * 100_000: "nested too deeply",
    '{"model": NaN}': "NaN is no JSON",
    "[]": "the file is []; allowed: an object",
    "{}": "lacks format; allowed: ",
    '{"format": "dcp-fix compare, answers 2"}': 'format is "dcp-fix compare, answers 2"; allowed: "',
}


@pytest.mark.parametrize("text", DAMAGE, ids=range(len(DAMAGE)))
def test_a_file_that_is_none_is_one_line_that_names_it(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "x.json").write_text(text)
    with serving(openai(stub)) as b:
        assert status(monkeypatch, "--a", tmp_path / "x.json", "--b", b) == 2
    lines = capsys.readouterr().err.splitlines()
    assert DAMAGE[text] in lines[0] and len(lines) == (7 if text == "{}" else 7 if "answers 2" in text else 1)
    assert all("endpoint A: " in line and "x.json: " in line and len(line) < 400 for line in lines)


def test_a_file_that_is_no_regular_one_is_not_waited_for(tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "x.json")
    assert "x.json: is a FIFO; name a regular file" in refusal(monkeypatch, capsys, tmp_path / "x.json")


FIELDS = [
    ({"model": 3}, "model is 3; allowed: a name"),
    ({"pairs": "many"}, 'pairs is "many"; allowed: a number of prompts'),
    ({"sampling": [1]}, "sampling is [1]; allowed: an object of numbers"),
    ({"counting": {"text": 3}}, "counting.text is 3; allowed: text"),
    ({"counting": {"text": "x", "prompt_tokens": 1, "token_ids": [-1]}}, "counting.token_ids.0 is -1; allowed"),
    ({"answers": {"96": {"prompt": "x"}}}, 'answers.96.prompt is "x"; allowed: a SHA256'),
    ({"more": 1}, "more is not known here"),
]


@pytest.mark.parametrize(("changes", "says"), FIELDS, ids=range(len(FIELDS)))
def test_a_field_of_another_type_is_named(kept, changes, says):
    path = kept(openai(stub))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as refused:
        Saved.load("A", path)
    lines = str(refused.value).split("\n")
    assert any(line.startswith(f"endpoint A: {path}: {says}") for line in lines), lines


def test_what_is_asked_for_has_to_make_sense(monkeypatch, tmp_path):
    assert status(monkeypatch, "--a", "http://localhost:1") == 2
    path = tmp_path / "x.json"
    assert status(monkeypatch, "--a", "http://localhost:1", "--b", "http://localhost:2", "--save", path) == 2
    assert status(monkeypatch, "--a", path, "--b", "http://localhost:2") == 2
    assert status(monkeypatch, "--a", "http://localhost:1", "--save", tmp_path / "no" / "x.json") == 2
    assert status(monkeypatch, "--a", "http://localhost:1", "--save", path, "--pairs", 2) == 2
    assert not path.exists()


# --- the paired test --------------------------------------------------------------------------------------------------


def answer(text):
    return SimpleNamespace(text=text, token_ids=None)


def rows(*prompts):
    """Rows of (A, A again, B, B again)."""
    made = []
    for a, a2, b, b2 in prompts:
        row = SimpleNamespace(a=answer(a), b=answer(b), again=(answer(a2), answer(b2)), equal=a == b)
        made.append(row)
    return made


SAME, OTHER = ("x", "x", "x", "x"), ("x", "x", "y", "y")
NOISE_A, NOISE_B, NOISY_AND_OTHER = ("x", "z", "x", "x"), ("x", "x", "x", "z"), ("x", "z", "y", "y")


@pytest.mark.parametrize(
    ("prompts", "counts", "p", "verdict"),
    [
        ([SAME] * 20, (0, 0, 0, 0, 0), 1.0, "equal"),
        ([SAME] * 20 + [NOISE_A] * 3, (0, 3, 0, 0, 3), 1.0, "equal"),
        ([SAME] * 20 + [OTHER] * 4, (4, 0, 0, 4, 0), 0.5**4, "within noise"),
        ([SAME] * 20 + [OTHER] * 5, (5, 0, 0, 5, 0), 0.5**5, "different"),
        ([OTHER] * 5 + [NOISE_A, NOISE_B], (5, 1, 1, 5, 2), (21 + 7 + 1) / 2**7, "within noise"),
        ([OTHER] * 8 + [NOISE_A, NOISE_B], (8, 1, 1, 8, 2), (45 + 10 + 1) / 2**10, "within noise"),
        ([OTHER] * 9 + [NOISE_A], (9, 1, 0, 9, 1), (10 + 1) / 2**10, "different"),
        ([NOISY_AND_OTHER] * 20, (20, 20, 0, 0, 0), 1.0, "within noise"),
    ],
)
def test_mcnemar_by_hand(prompts, counts, p, verdict):
    found = pairs.test(rows(*prompts))
    assert (found.differ, found.noise_a, found.noise_b, found.for_difference, found.for_noise) == counts
    assert found.p == pytest.approx(p) and found.verdict == verdict


def test_two_servers_with_the_same_noise_are_rarely_called_different():
    def draw(random):
        return "x" if random.random() < 0.7 else str(random.random())

    called = 0
    for seed in range(300):
        random = Random(seed)
        found = pairs.test(rows(*[tuple(draw(random) for _ in range(4)) for _ in range(20)]))
        called += found.verdict == "different"
    assert called <= 300 * pairs.ALPHA


def noisy(share, seed, change=lambda text: text):
    """A server that gets a word wrong in that share of its answers."""
    random = Random(seed)

    def edit(choice, answer):
        choice["text"] = change(choice["text"])
        choice.pop("token_ids", None)
        if random.random() < share:
            choice["text"] += f" {random.randrange(99)}"

    return edited(edit)


@pytest.mark.parametrize(
    ("second", "exit_status", "verdict"),
    [
        (lambda: noisy(0.3, 2), 0, "within noise"),
        (lambda: noisy(0.1, 2, lambda text: text.replace("vault", "cellar")), 1, "different"),
    ],
)
def test_noise_is_told_from_a_difference(monkeypatch, capsys, tmp_path, second, exit_status, verdict):
    with serving(noisy(0.3 if exit_status == 0 else 0.1, 1)) as a, serving(second()) as b:
        options = ["--a", a, "--b", b, "--pairs", 20, "--json", tmp_path / "c.json"]
        assert status(monkeypatch, *options) == exit_status
    written, printed = json.loads((tmp_path / "c.json").read_text()), capsys.readouterr().out
    assert written["verdict"] == verdict and len(written["rows"]) == written["paired"]["prompts"] == 20
    assert verdict.capitalize() in printed and "McNemar p = " in printed
    assert (written["paired"]["p"] < 0.05) is (verdict == "different") and written["paired"]["noise_a"] > 0
    assert len({row["prompt_sha256"] for row in written["rows"]}) == 20


def test_pairs_work_with_one_server_at_a_time_too(kept, monkeypatch, capsys):
    path = kept(noisy(0.1, 1), "--pairs", 12)
    with serving(noisy(0.1, 2, lambda text: text.replace("vault", "cellar"))) as b:
        assert status(monkeypatch, "--a", path, "--b", b, "--pairs", 12) == 1
    assert "Of 12 prompts A and B differ on 12" in capsys.readouterr().out
