"""What the ladder touches of vLLM, imitated: `LLM` and `SamplingParams`, in this process or as a package of a child's.

This LLM answers a prompt of the corpus rightly, and wrongly on 512 tokens where a defect is left. FAKE_VLLM names what
it does besides: crash, hang, grandchild, junk, signal (each beyond DCP1), silent (says nothing of the plugin), empty.
"""

import contextlib
import functools
import math
import os
import subprocess
import time
import traceback
from types import SimpleNamespace

from dcp_fix.real_vllm import boot, llm_child
from dcp_fix.tiny import corpus


@functools.cache
def answers():
    return {tuple(p.ids): (name, p.answer) for name in ("512", "1024+1536") for p in corpus.prompts(name, 2)}


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, tensor_parallel_size, decode_context_parallel_size=1, **rest):
        self.dcp, self.rest, self.seen = decode_context_parallel_size, rest, {}
        assert (rest.get("dcp_comm_backend") == "ag_rs") == (self.dcp > 1)
        self.does = os.environ.get("FAKE_VLLM", "")
        self.broken = bool(os.environ.get("DCP_FIX_PUT_BACK")) or os.environ.get("DCP_FIX_PLUGIN") == "0"
        self.talk()
        if self.dcp > 1:
            self.misbehave()

    def talk(self):
        print("\x1b[32mINFO\x1b[0m [pynccl.py:113] vLLM is using nccl==2.28.9", flush=True)
        print("(Worker pid=7) INFO Using FLASHMLA_SPARSE attention backend out of potential backends: []", flush=True)
        if self.does == "silent":
            return
        off = os.environ.get("DCP_FIX_PLUGIN") == "0"
        print("INFO dcp_fix: switched off by DCP_FIX_PLUGIN=0" if off else "INFO dcp_fix: this vLLM has k-rows")
        for name in filter(None, os.environ.get("DCP_FIX_PUT_BACK", "").split(",")):
            print(f"INFO dcp_fix: {name.replace('-', '_')}_put_back applied to vllm.models.x", flush=True)

    def misbehave(self):
        if self.does == "junk":
            print('\udcff\n{"event": "end"}')
        if self.does == "signal":
            os.kill(os.getpid(), 40)
        if self.does in ("grandchild", "crash", "hang"):
            process = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
            with open(os.environ["FAKE_PIDS"], "a") as pids:
                pids.write(f"{process.pid}\n")
        if self.does == "crash":
            print("(EngineCore pid=1) ERROR ValueError: no such backend", flush=True)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        if self.does == "hang":
            time.sleep(1000)

    def generate(self, prompts, params, use_tqdm):
        assert use_tqdm is False
        return [self.one(prompt["prompt_token_ids"], prompt["cache_salt"], params) for prompt in prompts]

    def one(self, ids, salt, params):
        cached = self.seen.setdefault(salt, 0)
        self.seen[salt] = len(ids)
        if params.max_tokens == 1:
            return self.output([5], 0)
        assert params.temperature == 0 and params.logprobs == 2
        name, answer = answers()[tuple(ids)]
        forced = (self.rest.get("attention_config") or {}).get("sparse_mla_force_mqa")
        if self.dcp > 1 and not forced and self.broken and name == "512":
            return self.output([320] + answer[1:], cached, nan=2)
        nan = 1 if self.does == "nan" and self.dcp > 1 else 0
        return self.output([] if self.does == "empty" and self.dcp > 1 else answer, cached, nan)

    def output(self, tokens, cached, nan=0):
        known = [{t: SimpleNamespace(logprob=-0.25), 319: SimpleNamespace(logprob=-3.0)} for t in tokens]
        known[:nan] = [{}, {tokens[1]: SimpleNamespace(logprob=math.nan)}][:nan] if nan else []
        completion = SimpleNamespace(token_ids=tuple(tokens), logprobs=known, text="")
        return SimpleNamespace(outputs=[completion], num_cached_tokens=cached)


def run_here(name, job, environment, folder, limit_s):
    """boot.run, without a process."""
    told, lines, log = (folder / f"{boot.slug(name)}.{kind}" for kind in ("job.json", "lines.jsonl", "log"))
    told.write_text(boot.json.dumps(job))
    lines.touch()
    before, failure = dict(os.environ), None
    os.environ.clear()
    os.environ.update(environment)
    try:
        with open(log, "w", errors="surrogateescape") as said, contextlib.redirect_stdout(said):
            try:
                llm_child.main(str(told), str(lines))
            except Exception:  # noqa: BLE001 - as a process would end
                traceback.print_exc(file=said)
                failure = "ended with status 1"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return boot.read(lines, log, failure)


def write(folder) -> None:
    """The package and this one's entry point, importable from `folder`."""
    entry = "[vllm.general_plugins]\ndcp_fix = dcp_fix.plugin.plugin:register\n"
    for name, content in {
        "vllm/__init__.py": f"from {__name__} import LLM, SamplingParams\n\n__version__ = '0.29.0'\n",
        "vllm-0.29.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.29.0\n",
        "dcp_fix-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: dcp_fix\nVersion: 0.1.0\n",
        "dcp_fix-0.1.0.dist-info/entry_points.txt": entry,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def as_module():
    """The package, in this process."""
    return SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams, __version__="0.29.0")
