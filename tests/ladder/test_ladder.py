"""ladder.py on the packaged checkpoint: small prompt classes with a small index_topk, then one class as it is."""

import json
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch

from dcp_fix import broken
from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.engine.engine import Generation
from dcp_fix.engine.sharded import Ops
from dcp_fix.ladder import ladder
from dcp_fix.ladder import report as ladder_report
from dcp_fix.ladder.ladder import FIRST, LAST, REFERENCE, RUNGS, LadderRow
from dcp_fix.records import records
from dcp_fix.tiny import corpus
from dcp_fix.workspace import MIB
from tests.checkpoints import random_checkpoint

# The first class is dense, the others sparse; 256 tokens are a block on each of four ranks.
TOPK = 128
SMALL = {"512": (110, 3), "1024+1536": (330, 6), "8192": (450, 6)}
BUDGET = 120 * MIB  # the historical plan takes 169 MiB for 450 tokens and 96 for 256
CLASSES = tuple(SMALL)
SHORT = CLASSES[:1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The packaged weights, whose answers have margins, with an indexer that chooses fewer keys."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = json.loads((corpus.CHECKPOINT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"index_topk": TOPK}))
    (folder / "model.safetensors").symlink_to(corpus.CHECKPOINT / "model.safetensors")
    return folder


@contextmanager
def small_classes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CLASSES", SMALL)
        patch.setattr(corpus, "CACHED", {"1024+1536": 256})
        patch.setattr(ladder, "BUDGET", BUDGET)
        yield


@pytest.fixture
def small():
    with small_classes():
        yield


def climb(folder, prompts=1, classes=CLASSES, rungs=RUNGS, **options):
    setup = ladder.load(folder, **{"tp": 4, "dcp": 4, "stale": "previous", "device": "cpu"} | options)
    return ladder.run(setup, prompts, classes, rungs)


@pytest.fixture(scope="module")
def rows(folder):
    """The whole ladder, one prompt per class."""
    with small_classes():
        return climb(folder)


def by_rung(rows, rung):
    return {row.prompt_class: row for row in rows if row.rung == rung}


def equal(rows, rung):
    return [row.equal for row in by_rung(rows, rung).values()]


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_the_rungs(rows):
    """Class by class, the long one last, which climbs the last rungs only."""
    order = [(name, rung) for name in CLASSES[:2] for rung in (REFERENCE, *RUNGS)]
    order += [("8192", rung) for rung in (REFERENCE, "+K rows", LAST)]
    assert [(row.prompt_class, row.rung) for row in rows] == order
    cached = {name: row.answers[0].cached for name, row in by_rung(rows, REFERENCE).items()}
    assert cached == dict.fromkeys(CLASSES, 0) | {"1024+1536": 256}
    assert equal(rows, FIRST) == equal(rows, "+query norm") == [0, 0]
    assert equal(rows, "+combine routing") == [0, 1]  # a dense prefill, and a sparse one
    assert equal(rows, "+K rows") == [1, 1, 0]
    assert equal(rows, LAST) == [1, 1, 1]
    assert ladder.repaired(rows, 1)


def test_a_workspace_beyond_the_budget_is_a_result(rows):
    failed = [row for row in rows if row.failure]
    assert [(row.rung, row.prompt_class, row.answers) for row in failed] == [("+K rows", "8192", [])]
    assert failed[0].failure.startswith("workspace: 450 tokens") and "budget is 120 MiB" in failed[0].failure


def test_another_kind_of_stale_memory(folder, small):
    rows = climb(folder, stale="noise", classes=SHORT, rungs=(FIRST, "+combine routing", LAST))
    assert [row.equal for row in rows] == [1, 0, 0, 1]


def test_every_prompt_is_scored_and_the_first_answers_as_if_alone(folder, small, rows):
    both = climb(folder, prompts=2, classes=SHORT, rungs=(FIRST, LAST))
    assert equal(both, FIRST) == [0] and equal(both, LAST) == [2]
    alone = {(row.rung, row.prompt_class): row.answers[0] for row in rows if row.answers}
    for row in both:
        first, second = row.answers
        assert first == alone[row.rung, row.prompt_class] and first.sha256 != second.sha256


def test_two_subgroups_that_each_hold_every_row(folder, small):
    assert ladder.repaired(climb(folder, dcp=2, classes=SHORT, rungs=(FIRST, LAST)), 1)


def test_each_rung_repairs_one_thing():
    steps = [(ops.norm_rope, ops.route, ops.plan) for ops in RUNGS.values()]
    assert [sum(a != b for a, b in zip(*pair, strict=True)) for pair in zip(steps, steps[1:], strict=False)] == [1] * 4
    assert RUNGS[LAST] == Ops() and RUNGS[FIRST].norm_rope is broken.norm_rope_skip_all_rows


def test_the_trained_checkpoint_climbs_the_ladder():
    """Right at DCP1, nonsense when unpatched, fluent and wrong without K rows, byte for byte right at the end."""
    rows = climb(corpus.CHECKPOINT, classes=SHORT)
    assert [(row.right, row.equal) for row in rows] == [(1, 1), (0, 0), (0, 0), (0, 0), (1, 1), (1, 1)]
    wrong = by_rung(rows, "+combine routing")["512"].answers[0].text
    assert wrong.endswith("<end>") and wrong.split()[3] in ("opens", "leads")


# --- the verdict ------------------------------------------------------------------------------------------------------


class Prompt:
    answer = [5, 6, 7]


def generation(tokens):
    return Generation(tokens, torch.eye(9)[tokens], 0)


def test_an_answer_is_judged_by_the_corpus_and_by_dcp1():
    right = ladder.judge(Prompt, generation([5, 6, 7]), generation([5, 6, 7]))
    assert (right.right, right.first_difference, right.smallest_margin) == (True, None, 1.0)
    assert right.sha256 == equality.digest([5, 6, 7]) and right.text == corpus.decode([5, 6, 7])
    wrong = ladder.judge(Prompt, generation([5, 8, 8, 8]), generation([5, 6, 7]))
    assert (wrong.right, wrong.first_difference, wrong.commonest_share) == (False, 1, 0.75)


@pytest.mark.parametrize(
    "first, last, ok",
    [
        ([0, 0], [2, 2], True),
        ([0, 0], [2, 1], False),
        ([0, 1], [2, 2], False),
        ([0, 0], [2, 0], False),
        ([], [], False),
    ],
)
def test_repaired_means_none_at_first_and_all_at_last(first, last, ok):
    class Counted(LadderRow):
        equal = property(lambda row: row.answers)

    rows = [Counted(FIRST, "c", n) for n in first] + [Counted(LAST, "c", n) for n in last]
    assert ladder.repaired(rows, 2) is ok


# --- the command ------------------------------------------------------------------------------------------------------


def test_each_row_is_printed_before_the_next_rung_is_asked(monkeypatch, capsys):
    printed = []

    def answers(rung, name, prompts):
        printed.append(capsys.readouterr().out)
        return [generation([int(rung in (REFERENCE, LAST))])], None

    monkeypatch.setattr(corpus, "prompts", lambda name, prompts: [Prompt])
    screen = ladder_report.Screen(ladder.Setup(None), 1, silent=False)
    rows = ladder.climb(answers, 1, SHORT, shown=screen.row)
    screen.end(rows, ladder.repaired(rows, 1))
    assert "another request's rows" in printed[0] and len(printed) == 1 + len(RUNGS)
    for rung, text in zip((REFERENCE, *RUNGS), printed[1:], strict=False):
        assert text.splitlines()[-1].startswith(rung)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Broken as reported, repaired")


def test_main_prints_and_records_the_same_and_exits_zero(folder, small, rows, tmp_path, capsys):
    path = tmp_path / "r.json"
    assert ladder.main(checkpoint=folder, json_path=path, classes=SHORT) == 0
    printed, written = capsys.readouterr(), records.load_record(path)["results"]
    assert written["repaired"] and written["prompts"] == 1 and written["stale"] == "previous"
    again = [[asdict(answer) for answer in row.answers] for row in rows if row.prompt_class == "512"]
    assert [row["answers"] for row in written["rows"]] == again  # nothing is left to chance
    lines = {line.split("  ")[0]: line for line in printed.out.splitlines()}
    assert all(lines[row["rung"]].endswith(row["answers"][0]["sha256"][:8]) for row in written["rows"])
    assert lines[REFERENCE].split()[-1] == lines[LAST].split()[-1] != lines[FIRST].split()[-1]
    assert printed.out.splitlines()[-1] == written["verdict"] and "repaired byte for byte" in written["verdict"]
    assert "+workspace: 512 tokens" in printed.err


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_names_every_row(rows, capsys, monkeypatch, width):
    monkeypatch.setattr(ladder_report, "WIDTH", width)
    screen = ladder_report.Screen(ladder.Setup(None), 1, silent=False)
    for row in rows:
        screen.row(row)
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.split("  ")[0] in (REFERENCE, *RUNGS)]
    assert len(table) == len(rows) and [line for line in lines if line.endswith(" tokens")] == [
        f"{name} tokens" for name in CLASSES
    ]
    for row, line in zip(rows, table, strict=True):
        assert row.failure in line if row.failure else len(line) <= width and row.answers[0].text[: width // 8] in line


def test_a_record_on_standard_output_is_all_that_is_printed(folder, rows, capsys, monkeypatch):
    monkeypatch.setattr(ladder, "run", lambda setup, prompts, classes, progress, shown: [*map(shown, rows)] and rows)
    assert ladder.main(checkpoint=folder, json_path="-") == 0
    assert json.loads(capsys.readouterr().out)["results"]["repaired"]


def test_a_screen_that_is_full_does_not_stop_the_run(rows, monkeypatch, tmp_path):
    """The record comes first, then what was lost is said."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        screen = ladder_report.Screen(ladder.Setup(None), 1, silent=False)
        screen.row(rows[0])
        with pytest.raises(UserError, match="standard output cannot be written"):
            records.deliver_record(tmp_path / "r.json", lambda: [1], screen.end, rows, True)
    assert records.load_record(tmp_path / "r.json")["results"] == [1]


def test_a_last_rung_that_is_still_broken_fails(folder, rows, monkeypatch):
    monkeypatch.setattr(ladder, "run", lambda *asked, **told: [row for row in rows if row.rung != LAST])
    assert ladder.main(checkpoint=folder) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dcp": 3}, "DCP size of 3 does not divide the TP size 4"),
        ({"dcp": 1}, "DCP size of 1 is what the ladder compares with"),
        ({"tp": 3, "dcp": 3}, "TP size of 3 does not divide"),
        ({"device": "gpu"}, "'gpu' is unknown"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"classes": ("512", "9")}, "'9' is not one of 512, 1536"),
        ({"classes": ("",)}, "'' is not one of 512, 1536"),
        ({"classes": ("8192",)}, "8192 tokens climb the last rungs only"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(folder, tmp_path, options, message):
    path = tmp_path / "r.json"
    with pytest.raises(UserError, match=message) as error:
        ladder.main(checkpoint=folder, json_path=path, **options)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def cut(path, length):
    """Keep the first `length` bytes of a file."""
    path.write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize(
    "damage, named",
    [
        (lambda folder: None, "a vocabulary of 97, the prompts one of 320"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: cut(folder / "config.json", 100), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: cut(folder / "model.safetensors", 5), "model.safetensors"),
        (lambda folder: cut(folder / "model.safetensors", 100_000), "model.safetensors: .*damaged or truncated"),
    ],
)
def test_a_checkpoint_of_other_words_or_a_damaged_one_is_refused_by_name(tmp_path, damage, named):
    folder = random_checkpoint(tmp_path / "checkpoint")
    damage(folder)
    with pytest.raises(UserError, match=named):
        ladder.main(checkpoint=folder)
