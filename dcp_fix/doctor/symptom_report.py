"""The command `dcp-fix doctor --symptom`: questions or answers as an option, then the probes that fit."""

import importlib.util
from dataclasses import replace

from rich.console import Console

from dcp_fix.base import output
from dcp_fix.doctor import symptom
from dcp_fix.doctor.report import Report, examine, print_table


def ask(question: str) -> str:
    """One question at the terminal."""
    import typer

    text, answers = symptom.QUESTIONS[question]
    for answer, meaning in answers.items():
        if meaning:
            typer.echo(f"  {answer}: {meaning}", err=True)
    choices = "/".join([*answers, symptom.UNKNOWN])
    while (given := typer.prompt(f"{text} [{choices}]", default=symptom.UNKNOWN, show_default=False, err=True)) not in (
        *answers,
        symptom.UNKNOWN,
    ):
        typer.echo(f"  please answer with one of {choices}", err=True)
    return given


def main(targets, *, releases=(), answers: str | None = None, json: str | None = None) -> int:
    """Ask, or take `answers`, name the probes that can tell, and run them where a target is given or installed.

    Exit status: that of the probes that were run, 0 where none was.
    """
    output.check(json)
    known = None if answers is None else symptom.parse(answers)
    said, end = symptom.diagnose(ask if known is None else lambda question: known.get(question, symptom.UNKNOWN))
    spec, release = (targets[0], None) if targets else (None, releases[0]) if releases else (None, None)
    report = None
    if end.probes and (targets or releases or importlib.util.find_spec("vllm")):
        found = examine(spec, release=release)
        report = replace(found, probes=[probe for probe in found.probes if probe.id in end.probes])
    content = symptom.as_json(said, end) | {"report": report.as_json() if report else None}
    output.deliver(json, content, show_end, end, report)
    return report.status() if report else 0


def show_end(end, report: Report | None) -> None:
    """What fits, which probes look at it, and what they found."""
    console = Console(soft_wrap=False)
    console.print(f"What fits: {end.because}.", highlight=False, markup=False)
    looking = f"Probes that look at it: {', '.join(end.probes)}." if end.probes else "No probe looks at this."
    console.print(looking, highlight=False, markup=False)
    if end.other:
        console.print(f"Else: {end.other}.", highlight=False, markup=False)
    if report is not None:
        print_table(console, report)
    elif end.probes:
        console.print(
            "Run them: dcp-fix doctor, with a wheel, a folder or --release 0.29.0", highlight=False, markup=False
        )
