"""The command line: thin wrappers that import a module only to run it, so that `--help` never waits for torch.

What an option may be is checked here, before the work. What is wrong with the input is one line on standard error and
exit status 2; Ctrl-C and SIGTERM end everything that was begun; anything else unexpected is a fault of this program,
shown with its traceback and status 70, since 1 means "different" or "a defect" (errors.py).
"""

import ctypes
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dcp_fix import __version__
from dcp_fix.base import output
from dcp_fix.base.errors import FAULT, USER_ERROR, UserError, shown, shown_lines
from dcp_fix.base.process import BROKEN_PIPE, flushed, ready_streams, status_of, stoppable, to_nowhere

STATUSES = """Exit status: 0 the same, no defect, or done; 1 different, or a defect; 2 the input or the surroundings;
70 a fault of this program, which please report; 130 after Ctrl-C, 143 after SIGTERM."""
REPORT = (
    "This is a fault of dcp_fix, not of your input. Please report it where you have dcp_fix from: the lines above, the "
    "command, and what `dcp-fix --version` prints."
)
MOST_PROMPTS = 1000  # in a class
MOST_RANKS = 1024
MOST_SECONDS = 86400.0
MOST_TOKENS = 1 << 20  # of requests that decode together
MOST_CONTEXT = 1 << 24
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

app = typer.Typer(
    name="dcp-fix",
    help="Sparse MLA under decode context parallelism (DCP): see the garbage, repair it, prove the bytes are the same.",
    epilog=STATUSES,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Time it: exact mode, the kernels, packing in real vLLM.")
app.add_typer(bench, name="bench")
ClickError = typer.BadParameter.__mro__[2]  # of all mistakes in arguments; typer does not export it


def main() -> None:
    """Run the command that `sys.argv` names and exit with its status."""
    ready_streams()
    with stoppable():
        try:
            status = run(sys.argv[1:] or ["--help"])
        except KeyboardInterrupt as stop:
            leave(status_of(stop))
    sys.exit(flushed(status))


def run(arguments: list[str]) -> int:
    """The exit status of a command line, with every error said on standard error."""
    try:
        with typer.main.get_command(app).make_context("dcp-fix", arguments) as context:
            return context.command.invoke(context) or 0
    except typer.Exit as done:
        return done.exit_code
    except UserError as error:
        say(error)
        return USER_ERROR
    except ClickError as error:  # type: ignore[misc]
        context = getattr(error, "ctx", None)
        say(f"{error.format_message()} See {context.command_path if context else 'dcp-fix'} --help.")
        return USER_ERROR
    except BrokenPipeError:
        to_nowhere(sys.stdout)
        return BROKEN_PIPE
    except SystemExit as stop:
        return BROKEN_PIPE if stop.code == 1 else int(stop.code)  # 1 is what rich makes of a broken pipe
    except Exception as error:  # noqa: BLE001 - whatever it is, 1 would say "different"
        if out_of_memory(error):
            say(f"not enough memory for what was asked ({error}); ask for less, or on another machine")
            return USER_ERROR
        print(shown_lines(traceback.format_exc()), REPORT, sep="\n", file=sys.stderr)
        return FAULT


def say(error: object) -> None:
    """An error on standard error, a line for each that it names, nothing of it able to move the cursor."""
    for line in shown_lines(error).split("\n"):
        print(f"error: {line}", file=sys.stderr)


def out_of_memory(error: Exception) -> bool:
    """Whether something did not fit: torch has a type for GPUs and a sentence for CPUs, the system one of its own."""
    told = ("allocate memory", "can't start new thread")
    return type(error).__name__ in ("OutOfMemoryError", "MemoryError") or any(text in str(error) for text in told)


def leave(status: int) -> None:
    """End the process now: rank threads may still compute, and torch would abort under them."""
    print("stopped", file=sys.stderr)
    flushed(status)
    os._exit(status)


def show_version(wanted: bool) -> None:
    """Print the version and stop, if `--version` was given."""
    if wanted:
        typer.echo(f"dcp_fix {__version__}")
        raise typer.Exit


def writable(path: Path | None) -> Path | None:
    """Refuse an output file that could not be written, and what could not stand in it, before the run."""
    output.check(path)
    told = os.environ.get("DCP_FIX_COMMIT", "").removesuffix("-dirty")
    if path is not None and told and not (len(told) == 40 and set(told) <= set("0123456789abcdef")):
        raise UserError(
            f"DCP_FIX_COMMIT is {shown(told)}; allowed: a commit of 40 hexadecimal digits, or -dirty after it"
        )
    undecoded = [word for word in sys.argv[1:] if any("\ud800" <= letter <= "\udfff" for letter in word)]
    if path is not None and undecoded:
        raise UserError(f"argument {shown(undecoded[0])}: is not UTF-8, and a record names its command; rename it")
    return path


def folder(path: str) -> Path:
    """A folder to write into, which is there or can be made."""
    if not path:
        raise typer.BadParameter("'' is no folder; . is the one where you are.")
    output.check_folder(Path(path))
    return Path(path)


def finite(seconds: float | None) -> float | None:
    """Refuse what is no number: NaN is neither below a limit nor above it."""
    if seconds is not None and math.isnan(seconds):
        raise typer.BadParameter("nan is no time.")
    return seconds


def names(text: str) -> tuple[str, ...]:
    """A list such as 512,1536, in which nothing is empty or stands twice."""
    found = tuple(part.strip() for part in text.split(","))
    for name in found:
        if not name or found.count(name) > 1:
            wrong = f"'{shown(name)}' stands twice" if name else "a name is empty"
            raise typer.BadParameter(f"'{shown(text)}': {wrong}.")
    return found


def numbers(text: str, most: int = MOST_RANKS) -> tuple[int, ...]:
    """A list such as 1,2,4, of at most 64 numbers from 1 to `most`."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 20 for part in parts):
        raise typer.BadParameter(f"'{shown(text)}' is no list of numbers such as 1,2,4.")
    found = tuple(map(int, parts))
    if len(found) > 64 or not 1 <= min(found) <= max(found) <= most:
        raise typer.BadParameter(f"'{shown(text)}': 64 numbers at most; each must be at least 1, at most {most}.")
    return found


def refuse(context: typer.Context, options: tuple[str, ...], why: str) -> None:
    """Refuse those of the options that were given, where they would do nothing."""
    given = [name for name in options if context.get_parameter_source(name).name == "COMMANDLINE"]
    if given:
        said = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"{said}: no meaning with {why}.", context)


Output = Annotated[
    Path | None, typer.Option(callback=writable, help="Write the evidence to this file; - is standard output.")
]
Prompts = Annotated[int, typer.Option(min=1, max=MOST_PROMPTS, help="Prompts in each class.")]
Classes = Annotated[str, typer.Option(help="Prompt classes.")]
CLASSES = "512,1536,1024+1536,8192"
Tp = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Tensor-parallel size: the number of ranks.")]
Dcp = Annotated[
    int, typer.Option(min=1, max=MOST_RANKS, help="Decode-context-parallel size above 1, a divisor of --tp.")
]
Device = Annotated[str, typer.Option(help="cpu, or cuda for the Triton kernels.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Checkpoint folder made by `dcp-fix train`; without it, the packaged one.")
]


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Version.")] = False,
) -> None:
    """Hold the options that stand before a command."""


@app.command()
def reproduce(
    prompts: Annotated[
        int, typer.Option(min=1, max=MOST_PROMPTS, help="Prompts scored in each class; the first is shown.")
    ] = 1,
    stale: Annotated[
        Literal["zeros", "noise", "previous"],
        typer.Option(help="What unwritten memory holds: zeros, noise, or another request's rows."),
    ] = "previous",
    classes: Classes = CLASSES,
    json: Output = None,
    tp: Tp = 4,
    dcp: Dcp = 4,
    device: Device = "cpu",
    checkpoint: Checkpoint = None,
) -> None:
    """Climb the repair ladder: unpatched, +query norm, +combine routing, +K rows, +workspace.

    Exit status 0 only if the last rung equals DCP1 in every prompt class and the first does not.
    """
    keep_freed_memory()
    from dcp_fix.ladder import ladder

    options: dict[str, Any] = {
        "tp": tp,
        "dcp": dcp,
        "device": device,
        "checkpoint": checkpoint,
        "classes": names(classes),
    }
    raise typer.Exit(ladder.main(prompts=prompts, stale=stale, json_path=json, **options))


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: else a tenth of the time goes into having the same pages cleared again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) if mallopt else ():
        mallopt(option, 1 << 30)


@app.command()
def reproduce_vllm(
    prompts: Prompts = 1,
    classes: Classes = CLASSES,
    json: Output = None,
    tp: Tp = 4,
    dcp: Dcp = 4,
    checkpoint: Checkpoint = None,
    model: Annotated[str | None, typer.Option(help="Another GLM-5 or DeepSeek-V3.2, by folder or name.")] = None,
    put_back: Annotated[
        str | None,
        typer.Option(help="Defects to put back, all and then one fewer: query-norm,combine-routing,k-rows."),
    ] = None,
    rungs: Annotated[
        str | None, typer.Option(help="dcp1, installed, workaround, plugin, or defects such as query-norm+k-rows.")
    ] = None,
    one_batch: Annotated[bool, typer.Option("--one-batch", help="Ask all prompts at once as well.")] = False,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="Compile and use CUDA graphs.")] = False,
    pcp: Annotated[int | None, typer.Option(min=1, help="Prefill-context-parallel size.")] = None,
    llm: Annotated[list[str] | None, typer.Option(help="An argument of `LLM`, key=value (repeatable).")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1.0, max=MOST_SECONDS, callback=finite, help="Seconds for one rung (600).")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(parser=folder, metavar="DIRECTORY", help="Folder for vLLM's logs.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Take over the rungs of this record.")] = None,
) -> None:
    """The same ladder in the installed vLLM, on GPUs: as installed, defects put back, with the plugin."""
    from dcp_fix.real_vllm import real_ladder

    asked: dict[str, Any] = {"tp": tp, "dcp": dcp, "checkpoint": checkpoint, "prompts": prompts}
    asked |= {"classes": ",".join(names(classes))}
    asked |= {"model": model, "put_back": put_back, "rungs": rungs, "one_batch": one_batch, "cuda_graphs": cuda_graphs}
    asked |= {"pcp": pcp, "llm": llm, "timeout": timeout, "logs": logs, "resume": resume}
    raise typer.Exit(real_ladder.from_options(json_path=json, **asked))


@app.command()
def verify(
    context: typer.Context,
    tp: Tp = 4,
    dcp: Annotated[
        str, typer.Option(help="DCP sizes to compare, divisors of --tp; the first is the reference.")
    ] = "1,2,4",
    classes: Classes = CLASSES,
    prompts: Prompts = 1,
    combine: Annotated[
        str,
        typer.Option(
            help="How partial outputs are combined: ag_rs, a2a; exact or exact_ag_rs for the same bits everywhere."
        ),
    ] = "ag_rs",
    logits: Annotated[
        bool,
        typer.Option(
            "--logits", help="Demand identical logits, as exact does unasked, and print a digest for every step."
        ),
    ] = False,
    device: Device = "cpu",
    procs: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RANKS, help="Start this many processes, one a rank; without it, ranks are threads."
        ),
    ] = None,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="Record decode steps as CUDA graphs.")] = False,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Allow more processes than GPUs; collectives then go over gloo.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=1.0, max=MOST_SECONDS, callback=finite, help="Seconds that a rank may lag behind the others."),
    ] = 300.0,
    record: Output = None,
    checkpoint: Checkpoint = None,
    passes: Annotated[
        str, typer.Option(help="free: each size answers by itself; forced: every sublayer on DCP1's input.")
    ] = "free,forced",
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant a defect at every size but the first; `list` names them, `all` runs healthy configurations "
            "and then each defect, forced."
        ),
    ] = None,
) -> None:
    """Check that every DCP size gives the same answer, token by token and step by step on DCP1's input.

    Columns. prompt: class, or a small case for what classes cannot show (short, sparse, ties, prefix). tokens: against
    the first DCP size's. logits: how far apart, in units in the last place of the largest. margin: by how much the
    chosen token's logit leads at the closest step. forced: the first step that makes more than rounding of DCP1's
    input, else the step that came closest to its bound.

    Exit status: 0 the same, 1 different, 2 bad input, 3 a rank that another one's failure stopped, else see --help.
    """
    if plant == "list":
        refuse(context, tuple(name for name in context.params if name != "plant"), "--plant list")
    if plant == "all":
        unused = ("prompts", "combine", "logits", "procs", "cuda_graphs", "share_gpus", "passes")
        refuse(context, unused, "--plant all, which runs the forced pass of ag_rs and a2a on threads")
    from dcp_fix.verify import all_planted
    from dcp_fix.verify import verify as verification

    if plant == "list":
        typer.echo(all_planted.listing())
        raise typer.Exit
    settings: dict[str, Any] = {
        "tp": tp,
        "prompts": prompts,
        "combine": combine,
        "device": device,
        "cuda_graphs": cuda_graphs,
    }
    settings |= {"logits": logits, "dcp": numbers(dcp), "classes": names(classes), "share_gpus": share_gpus}
    settings |= {"passes": names(passes)} | ({"checkpoint": checkpoint} if checkpoint else {})
    if plant == "all":
        raise typer.Exit(all_planted.main(verification.Settings(**settings), record, timeout))
    raise typer.Exit(verification.main(verification.Settings(**settings, plant=plant), procs, timeout, record))


@app.command()
def multi_gpu(
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="cuda: NCCL between GPUs. cpu: gloo.")] = "cuda",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Processes, a power of two; without it, as many as there are GPUs."),
    ] = None,
    classes: Classes = CLASSES,
    prompts: Prompts = 1,
    record: Output = None,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Prove it on this host's GPUs: ladder, every DCP size, CUDA graphs, times of the combine, workspace; one record.

    Exit status: 0 all is as it should be, 1 it is not, 2 bad input, else see --help.
    """
    from dcp_fix.verify import multi_gpu as script

    plan = script.Plan(device, ranks or script.most_ranks(device), names(classes), prompts)
    raise typer.Exit(script.main(plan, record, part, out))


@app.command()
def doctor(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(help="Wheels, site-packages folders, checkouts; none: the installed vLLM."),
    ] = None,
    release: Annotated[list[str] | None, typer.Option(help="A release on PyPI, such as 0.29.0 (repeatable).")] = None,
    with_plugin: Annotated[bool, typer.Option("--with-plugin", help="Probe again with the plugin applied.")] = False,
    serve_args: Annotated[str | None, typer.Option(help="Arguments of `vllm serve` to check, as one string.")] = None,
    json: Output = None,
) -> None:
    """Say which of the defects a vLLM has, by running its own code in a child process. No GPU needed.

    A probe executes the target's code: examine only what you would also install.

    Exit status: 0 no defect, 1 a defect, 2 a target that cannot be read.
    """
    from dcp_fix.doctor import report

    paths = [str(target) for target in targets or ()]
    raise typer.Exit(
        report.main(paths, releases=release or (), with_plugin=with_plugin, serve_args=serve_args, json=json)
    )


@app.command()
def compare(
    a: Annotated[
        str, typer.Option("--a", help="An OpenAI-compatible endpoint, such as http://localhost:8001, or saved answers.")
    ],
    b: Annotated[str | None, typer.Option("--b", help="Another one, serving the same model.")] = None,
    save: Annotated[
        Path | None, typer.Option(callback=writable, help="Instead of --b: keep the answers of --a in this file.")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(min=5, max=1000, help="This many prompts, and a test against the servers' own noise.")
    ] = None,
    json: Output = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MOST_SECONDS, callback=finite, help="Seconds to wait for one answer.")
    ] = 120.0,
) -> None:
    """Ask two serving endpoints the same three prompts, greedily, and compare the answers byte for byte.

    One server at a time: --a URL --save dcp1.json, then --a dcp1.json --b URL.

    Exit status: 0 equal, or with --pairs no more than noise; 1 different; 2 they cannot be compared.
    """
    from dcp_fix.compare import compare as comparison

    raise typer.Exit(comparison.main(a, b, json, timeout, save, pairs))


@bench.command("exact")
def bench_exact(
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it.")] = "cuda",
    tokens: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8,32,128",
    contexts: Annotated[str, typer.Option(help="Tokens that each request has cached.")] = "8192,65536",
    dcp: Annotated[str, typer.Option(help="DCP sizes, divisors of --tp.")] = "1,4",
    tp: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Tensor-parallel size, over which 64 heads are shared.")
    ] = 4,
    topk: Annotated[int, typer.Option(min=1, max=MOST_CONTEXT, help="Selected keys of a token.")] = 2048,
    record: Output = None,
) -> None:
    """Time one rank's decode attention, ordinary and exact, and count the bytes that it sends."""
    from dcp_fix.bench import exact_cost

    sizes = (numbers(tokens, MOST_TOKENS), numbers(contexts, MOST_CONTEXT), numbers(dcp))
    raise typer.Exit(exact_cost.main(device, *sizes, tp, topk=topk, record_path=record))


@bench.command("kernels")
def bench_kernels(
    works: Annotated[str, typer.Option(help="Which of them.")] = "launch,norm,combine,attend",
    against: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="A folder with an unpacked or installed vLLM, to beat."),
    ] = None,
    record: Output = None,
) -> None:
    """Time the kernels on a GPU, each right by fp64 first, beside those of a vLLM."""
    from dcp_fix.bench import kernel_bench

    raise typer.Exit(kernel_bench.main(names(works), against, record))


@bench.command("pack")
def bench_pack(
    tp: Tp = 2,
    dcp: Dcp = 2,
    llm: Annotated[list[str] | None, typer.Option(help="An argument of vLLM's `LLM`, key=value (repeatable).")] = None,
    record: Output = None,
) -> None:
    """Time the installed vLLM on --tp GPUs with ids packed for FlashMLA, DCP_FIX_PACK=1, and as installed."""
    from dcp_fix.real_vllm import pack_bench

    raise typer.Exit(pack_bench.from_options(tp, (dcp,), llm or [], record))


@app.command()
def train(
    out: Annotated[Path, typer.Argument(parser=folder, help="Folder for config, weights and tokenizer.")],
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the weights and of the texts.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it, a GPU where there is one.")] = None,
) -> None:
    """Train the small GLM-DSA checkpoint anew and score it on held-out questions."""
    from dcp_fix.tiny import train as training

    raise typer.Exit(training.main(out, seed=seed, device=device))
