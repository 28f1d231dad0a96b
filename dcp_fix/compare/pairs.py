"""Is the difference between two servers more than their own noise? A paired test with each server as its own control.

A server that other traffic keeps busy does not always answer alike, so that a difference alone says nothing. Each
prompt goes to each server twice. A prompt counts

    for a difference    both servers repeat themselves, and say different things
    for noise           a server contradicts itself, and A's first answer equals B's first

McNemar's exact test asks whether the first happens more often than the second: under the null, that A and B differ no
more than a server differs from itself, each such prompt is a coin. Noise of either server counts as noise, so the test
errs on the side of "within noise": it finds no difference where there is none more often than ALPHA promises.
"""

from dataclasses import dataclass

ALPHA = 0.05


@dataclass(frozen=True)
class Paired:
    """Counts of prompts. `differ`: A's first answer is not B's; `noise_a`, `noise_b`: a server contradicts itself."""

    prompts: int
    differ: int
    noise_a: int
    noise_b: int
    for_difference: int
    for_noise: int
    p: float

    @property
    def verdict(self) -> str:
        """equal, different, or within noise."""
        if self.p < ALPHA:
            return "different"
        return "within noise" if self.differ else "equal"


def test(rows) -> Paired:
    """The paired test of rows that each hold two answers of A and of B."""
    noise_a, noise_b = ([contradicts(row, end) for row in rows] for end in (0, 1))
    differ = [not row.equal for row in rows]
    noisy = [a or b for a, b in zip(noise_a, noise_b, strict=True)]
    more = sum(d and not n for d, n in zip(differ, noisy, strict=True))
    less = sum(n and not d for d, n in zip(differ, noisy, strict=True))
    return Paired(len(rows), sum(differ), sum(noise_a), sum(noise_b), more, less, mcnemar(more, less))


def contradicts(row, end: int) -> bool:
    """Whether an endpoint's second answer is not its first."""
    first, again = (row.a, row.b)[end], row.again[end]
    return (first.text, first.token_ids) != (again.text, again.token_ids)


def mcnemar(more: int, less: int) -> float:
    """The chance of `more` or more of the more + less discordant pairs, if each were a coin."""
    from scipy.stats import binomtest

    return float(binomtest(more, more + less, 0.5, alternative="greater").pvalue) if more + less else 1.0
