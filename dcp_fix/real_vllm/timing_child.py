"""One boot of vLLM's offline `LLM` that times what it is asked, as a process of its own (llm_child.py answers instead).

    python -m dcp_fix.real_vllm.timing_child JOB LINES

JOB is JSON: {"llm": arguments of `LLM`, "works": [{"name", "requests", "tokens", "new": [numbers of new tokens],
"fresh": whether every repetition gets other prompts, "repeats", "vocabulary"}]}. For each number of new tokens every
repetition is one call of `generate` with all requests at once, after one call that is not timed. Prompts are random
token ids, alike in every boot.

Lines of LINES: {"event": "booted", ...}, {"event": "timed", "name", "new", "seconds": [...]}, {"event": "end"} last.
"""

import random
import sys
import time

from dcp_fix.real_vllm.llm_child import booted


def main(job_path: str, lines_path: str) -> None:
    """Boot, time, end."""
    with booted(job_path, lines_path) as (job, llm, sampling, say):
        for work in job["works"]:
            for new in work["new"]:
                say("timed", name=work["name"], new=new, seconds=timed(llm, sampling, work, new))


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
    """Random token ids, of which the first three, which mean something, are left out."""
    draw = random.Random(f"{work['name']} {seed}")
    ids = [[draw.randrange(3, work["vocabulary"]) for _ in range(work["tokens"])] for _ in range(work["requests"])]
    return [{"prompt_token_ids": own} for own in ids]


if __name__ == "__main__":
    main(*sys.argv[1:])
