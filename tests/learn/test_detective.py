"""The detective cases: a true verdict stands, every false part of one falls, the tools show what the symptom says."""

import pytest

from dcp_fix.learn import detective
from dcp_fix.learn.detective import Verdict

RIGHT = {
    "A": Verdict("ownership", 3, (1, 2, 1)),
    "B": Verdict("attention", 2, (1, 0)),
    "C": Verdict("norm and RoPE", 4, (2, 2, 1)),
}
CHEAP = ["A", "B"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_true_verdict_stands(name, capsys):
    detective.check(name, RIGHT[name])
    assert f"case {name}: convicted by an input of size" in capsys.readouterr().out
    assert detective.CASES[name].size(RIGHT[name].input) == detective.CASES[name].smallest


@pytest.mark.parametrize("given", [(9, 4, 1), (300, 8, 4), (5, 2, 64)])
def test_any_input_that_convicts_is_accepted(given, capsys):
    detective.check("A", Verdict("ownership", 3, given))
    assert "a smaller one exists" in capsys.readouterr().out


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.parametrize(
    "part, value, said",
    [
        ("component", "combine", "would not explain"),
        ("component", "kernel", "is not one of"),
        ("mechanism", 1, "would that fail"),
    ],
)
def test_each_false_part_of_a_verdict_falls_without_naming_the_true_one(name, part, value, said):
    false = Verdict(**{**RIGHT[name].__dict__, part: value})
    with pytest.raises(AssertionError, match=said) as raised:
        detective.check(name, false)
    assert value == "kernel" or RIGHT[name].component not in str(raised.value)


@pytest.mark.parametrize("name, given", [("A", (8, 4, 1)), ("B", (2, 1)), ("C", (1, 2, 1))])
def test_an_input_on_which_the_suspect_passes_convicts_nobody(name, given):
    with pytest.raises(AssertionError, match="the suspect passes on it"):
        detective.check(name, Verdict(RIGHT[name].component, RIGHT[name].mechanism, given))


def test_inputs_that_mean_nothing_are_refused():
    for keys in ((), (-1, 2), (65,), (1,) * 9):
        with pytest.raises(ValueError, match="one number of 0 to 64"):
            detective.attend(keys)
    with pytest.raises(ValueError, match="choose 1 to 1536"):
        detective.run(0, 2)


def test_the_second_word_of_a_short_prompt_goes_wrong_and_the_first_does_not():
    first, *later = detective.run(64, 4)
    assert first <= detective.APART < max(later)
    assert detective.CASES["C"].mechanisms[3].startswith("Cached keys") and len(detective.CASES["C"].mechanisms) == 4
