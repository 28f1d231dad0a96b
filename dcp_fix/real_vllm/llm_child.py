"""One boot of vLLM's offline `LLM`, as a process of its own: answers go to a file, line by line, as they come.

    python -m dcp_fix.real_vllm.llm_child JOB ANSWERS     boots and asks
    python -m dcp_fix.real_vllm.llm_child --nccl          says which NCCL vLLM's wrapper gets here, as one line of JSON

JOB is JSON: {"llm": arguments of `LLM`, "sampling": arguments of `SamplingParams`, "groups": lists of requests that are
sent together}. A request is {"id", "ids": token ids, "cached": how many of them are sent first, as a request of their
own}. Its id is its cache salt too, so that no request finds what another one has cached.

Lines of ANSWERS: {"event": "booted", ...}, {"event": "answer", ...} per request, {"event": "end"} last. A logprob that
is NaN or missing is None there. vLLM prints to standard output and error as it likes.

When standard input ends (the process that started this one is gone) this process and its whole group are killed: vLLM
leaves workers behind when the process that made its `LLM` dies.
"""

import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path


def main(job_path: str, answers_path: str) -> None:
    """Boot, ask, end."""
    with booted(job_path, answers_path) as (job, llm, sampling, say):
        for group in job["groups"]:
            ask(llm, sampling, group, job["sampling"], say)


@contextmanager
def booted(job_path: str, lines_path: str):
    """(the job, its `LLM`, `SamplingParams`, say(event, **fields)), "booted" said; "end" is said if all went well."""
    if os.getpgrp() == os.getpid():  # not where somebody runs it by hand
        threading.Thread(target=die_with_parent, daemon=True).start()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    with open(lines_path, "a", encoding="utf-8") as lines:

        def say(event: str, **fields) -> None:
            lines.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
            lines.flush()

        began = time.monotonic()
        import vllm

        llm = vllm.LLM(**job["llm"])
        say("booted", seconds=round(time.monotonic() - began, 1), vllm=getattr(vllm, "__version__", "unknown"))
        yield job, llm, vllm.SamplingParams, say
        say("end")


def die_with_parent() -> None:
    """Wait for the end of standard input, then kill the process group: this process, vLLM's engine and its workers."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def ask(llm, sampling, group: list[dict], options: dict, say) -> None:
    """Send a group of requests at once, after what is to be cached of them."""
    first = [request for request in group if request["cached"]]
    if first:
        once = sampling(**options | {"max_tokens": 1})
        llm.generate([prompt(r, r["ids"][: r["cached"]]) for r in first], once, use_tqdm=False)
    outputs = llm.generate([prompt(r, r["ids"]) for r in group], sampling(**options), use_tqdm=False)
    for request, output in zip(group, outputs, strict=True):
        say("answer", id=request["id"], **answer(output))


def prompt(request: dict, ids: list[int]) -> dict:
    """A prompt as token ids, whose cache nobody else finds."""
    return {"prompt_token_ids": ids, "cache_salt": request["id"]}


def answer(output) -> dict:
    """What vLLM returned for one request, as JSON can hold it."""
    completion = output.outputs[0]
    tokens = [int(token) for token in completion.token_ids]
    entries = list(completion.logprobs or [])
    entries += [None] * (len(tokens) - len(entries))
    pairs = [numbers(token, entry) for token, entry in zip(tokens, entries, strict=False)]
    return {
        "tokens": tokens,
        "logprobs": [logprob for logprob, _ in pairs],
        "margins": [margin for _, margin in pairs],
        "cached": int(getattr(output, "num_cached_tokens", None) or 0),
        "text": completion.text or None,
    }


def numbers(token: int, entry) -> tuple[float | None, float | None]:
    """(logprob of a token, its distance from the next best), None for what is missing or no number."""
    known = {key: number(getattr(value, "logprob", value)) for key, value in (entry or {}).items()}
    chosen = known.pop(token, None)
    rest = [value for value in known.values() if value is not None]
    return chosen, chosen - max(rest) if chosen is not None and rest else None


def number(value) -> float | None:
    """A finite float, else None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# --- NCCL -------------------------------------------------------------------------------------------------------------


def nccl() -> dict:
    """The library that torch has loaded and the one that vLLM's wrapper loads: paths, versions, why it refuses."""
    import torch

    known = hasattr(torch._C, "_nccl_version")  # not in a torch for CPUs
    version = ".".join(map(str, torch.cuda.nccl.version())) if known else None
    ours = {"path": mapped_nccl(), "version": version}
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import find_nccl_library

    name = find_nccl_library()
    theirs = {"path": name, "version": None, "missing": [], "refused": None}
    try:
        library = ctypes.CDLL(name)
        theirs["path"] = name if os.path.isabs(name) else mapped_nccl()
        theirs["version"] = version_of(library)
        theirs["missing"] = [f.name for f in NCCLLibrary.exported_functions if not hasattr(library, f.name)]
        NCCLLibrary(name)
    except Exception as error:  # noqa: BLE001 - whatever the wrapper raises, it is what disables the communicator
        theirs["refused"] = f"{type(error).__name__}: {error}"
    return {"torch": ours, "vllm": theirs}


def version_of(library) -> str | None:
    """'2.28.9', as the library itself says; None where it is no NCCL."""
    if not hasattr(library, "ncclGetVersion"):
        return None
    value = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(value))
    return f"{value.value // 10000}.{value.value // 100 % 100}.{value.value % 100}"


def mapped_nccl() -> str | None:
    """Path of the libnccl that this process has mapped, or None."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = [line.split(None, 5)[-1] for line in lines if "libnccl" in line]
    return paths[0] if paths else None


if __name__ == "__main__":
    if sys.argv[1:] == ["--nccl"]:
        print("\n" + json.dumps(nccl()))
    else:
        main(*sys.argv[1:])
