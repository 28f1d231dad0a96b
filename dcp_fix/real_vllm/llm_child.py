"""One boot of vLLM's offline `LLM`, as a process of its own: what it says goes to a file, line by line, as it comes.

    python -m dcp_fix.real_vllm.llm_child JOB LINES     boots, answers, times

JOB is JSON: {"llm": arguments of `LLM`} and one or both of

    "sampling", "groups"    arguments of `SamplingParams`, and lists of requests that are sent together. A request is
                            {"id", "ids": token ids, "cached": how many of them are sent first, as a request of their
                            own}. Its id is its cache salt too, so that none finds what another one has cached.
    "works"                 [{"name", "requests", "tokens", "new": [numbers of new tokens], "fresh": whether every
                            repetition gets other prompts, "repeats", "vocabulary"}]: what is timed. A repetition is
                            one call of `generate` with all requests, after one call that is not timed.

boot.py has the schema of the lines. A logprob that is NaN or missing is None there. vLLM prints as it likes.

When standard input ends (the process that started this one is gone), this process and all that it started are killed.
"""

import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dcp_fix.base.leash import leashed

LEAVE_S = 20.0  # how long vLLM may take to shut down by itself
GONE_S = 15.0  # how long killed processes may take to give the GPUs back


def main(job_path: str, lines_path: str) -> None:
    """Boot, do the job, and say so."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    with open(lines_path, "a", encoding="utf-8") as lines:

        def say(event: str, **fields) -> None:
            lines.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
            lines.flush()

        began = time.monotonic()
        import vllm

        llm = vllm.LLM(**job["llm"])
        say("booted", seconds=[round(time.monotonic() - began, 1)], vllm=getattr(vllm, "__version__", "unknown"))
        for group in job.get("groups", ()):
            ask(llm, vllm.SamplingParams, group, job["sampling"], say)
        for work in job.get("works", ()):
            for new in work["new"]:
                say("timed", id=f"{work['name']} {new}", seconds=timed(llm, vllm.SamplingParams, work, new))
        say("end")


# --- answers ----------------------------------------------------------------------------------------------------------


def ask(llm, sampling, group: list[dict], options: dict, say: Callable) -> None:
    """Send a group of requests at once, after what is to be cached of them."""
    first = [request for request in group if request["cached"]]
    if first:
        once = sampling(**options | {"max_tokens": 1})
        llm.generate([prompt(r, r["ids"][: r["cached"]]) for r in first], once, use_tqdm=False)
    outputs = llm.generate([prompt(r, r["ids"]) for r in group], sampling(**options), use_tqdm=False)
    for request, output in zip(group, outputs, strict=True):
        say("answer", id=request["id"], answer=answer(output))


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
        "smallest_margin": min((margin for _, margin in pairs if margin is not None), default=None),
        "cached": int(getattr(output, "num_cached_tokens", None) or 0),
        "text": completion.text or None,
    }


def numbers(token: int, entry: dict | None) -> tuple[float | None, float | None]:
    """(logprob of a token, its distance from the next best), None for what is missing or no number."""
    known = {key: number(getattr(value, "logprob", value)) for key, value in (entry or {}).items()}
    chosen = known.pop(token, None)
    rest = [value for value in known.values() if value is not None]
    return chosen, chosen - max(rest) if chosen is not None and rest else None


def number(value: object) -> float | None:
    """A finite float, else None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# --- times ------------------------------------------------------------------------------------------------------------


def timed(llm, sampling, work: dict, new: int) -> list[float]:
    """Seconds of each repetition."""
    seconds, options = [], sampling(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    for repeat in range(work["repeats"] + 1):
        prompts = prompts_of(work, seed=repeat if work["fresh"] else 0)
        began = time.perf_counter()
        llm.generate(prompts, options, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def prompts_of(work: dict, seed: int) -> list[dict]:
    """Random token ids, alike in every boot; the first three ids, which mean something, are left out."""
    draw = random.Random(f"{work['name']} {seed}")
    ids = [[draw.randrange(3, work["vocabulary"]) for _ in range(work["tokens"])] for _ in range(work["requests"])]
    return [{"prompt_token_ids": own} for own in ids]


def on_leash(work: Callable[[], None]) -> None:
    """Do the work; all that it leaves is ended with it, or as soon as standard input ends."""
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def leaving() -> None:
        work()
        ending = threading.Timer(LEAVE_S, os._exit, (0,))  # vLLM's own shutdown may hang
        ending.daemon = True
        ending.start()
        sys.exit(0)

    leashed(lifeline, leaving, patience=GONE_S)


if __name__ == "__main__":
    on_leash(lambda: main(*sys.argv[1:]))
