"""A `vllm` package that looks like the real one as far as the ladder touches it: LLM, SamplingParams, NCCL's wrapper.

Its LLM answers a prompt of the corpus rightly, and wrongly on 512 tokens where a defect is left. FAKE_VLLM names what
it does besides: crash-at-dcp2, hang, grandchild, junk, silent (says nothing of the plugin), old-nccl.
"""

import textwrap

PACKAGE = """
import math, os, subprocess, sys, time
from types import SimpleNamespace as Space
from dcp_fix.tiny import corpus

__version__ = "0.29.0"
WHAT = os.environ.get("FAKE_VLLM", "")
BACK = os.environ.get("DCP_FIX_PUT_BACK", "")
OFF = os.environ.get("DCP_FIX_PLUGIN") == "0"
ANSWERS = {tuple(p.ids): (name, p.answer) for name in corpus.CLASSES for p in corpus.prompts(name, 2)}


class SamplingParams:
    def __init__(self, temperature, max_tokens, logprobs, detokenize=True, stop_token_ids=None):
        assert temperature == 0 and logprobs == 2
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, tensor_parallel_size, decode_context_parallel_size=1, **rest):
        self.dcp, self.rest, self.seen = decode_context_parallel_size, rest, {}
        assert (rest.get("dcp_comm_backend") == "ag_rs") == (self.dcp > 1)
        print("\\x1b[32mINFO\\x1b[0m [pynccl.py:113] vLLM is using nccl==2.28.9", flush=True)
        print("(Worker pid=7) INFO Using FLASHMLA_SPARSE attention backend out of potential backends: []", flush=True)
        if WHAT != "silent":
            print("INFO dcp_fix: switched off by DCP_FIX_PLUGIN=0" if OFF else "INFO dcp_fix: this vLLM has k-rows")
            for name in filter(None, BACK.split(",")):
                print(f"INFO dcp_fix: {name.replace('-', '_')}_put_back applied to vllm.models.x", flush=True)
        if WHAT == "junk":
            os.write(1, b"\\xff\\xfe\\n{\\"event\\": \\"end\\"}\\n")
        if WHAT in ("grandchild", "crash-at-dcp2") and self.dcp > 1:
            away = WHAT == "grandchild"
            process = subprocess.Popen(["sleep", "1000"], start_new_session=away)
            open(os.environ["FAKE_PIDS"], "a").write(f"{process.pid}\\n")
        if WHAT == "crash-at-dcp2" and self.dcp > 1:
            print("(EngineCore pid=1) ERROR ValueError: no such backend", flush=True)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        if WHAT == "hang" and self.dcp > 1:
            print("hanging", flush=True)
            time.sleep(1000)

    def generate(self, prompts, params, use_tqdm):
        assert use_tqdm is False
        return [self.one(prompt, params) for prompt in prompts]

    def one(self, prompt, params):
        ids, salt = prompt["prompt_token_ids"], prompt["cache_salt"]
        cached = self.seen.setdefault(salt, 0)
        self.seen[salt] = len(ids)
        if params.max_tokens == 1:
            return self.output([5], 0)
        name, answer = ANSWERS[tuple(ids)]
        forced = (self.rest.get("attention_config") or {}).get("sparse_mla_force_mqa")
        if self.dcp > 1 and not forced and (BACK or OFF) and name == "512":
            return self.output([320] + answer[1:], cached, bad=True)
        return self.output(answer, cached)

    def output(self, tokens, cached, bad=False):
        probs = [{t: Space(logprob=-0.25), 319: Space(logprob=-3.0)} for t in tokens]
        if bad:
            probs[0] = {}
            probs[1] = {tokens[1]: Space(logprob=math.nan)}
        completion = Space(token_ids=tuple(tokens), logprobs=probs, text="")
        return Space(outputs=[completion], num_cached_tokens=cached)
"""
WRAPPER = """
from types import SimpleNamespace as Space
import os

class NCCLLibrary:
    exported_functions = [Space(name="strlen"), Space(name="ncclCommQueryProperties")]
    def __init__(self, path):
        if os.environ.get("FAKE_VLLM") == "old-nccl":
            raise AttributeError("undefined symbol: ncclCommQueryProperties")
"""


def write(folder) -> None:
    """The package, importable from `folder`."""
    files = {
        "__init__.py": PACKAGE,
        "distributed/device_communicators/pynccl_wrapper.py": WRAPPER,
        "utils/nccl.py": 'def find_nccl_library():\n    return "libc.so.6"\n',
    }
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for name, content in {
        "vllm-0.29.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.29.0\n",
        "dcp_fix-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: dcp_fix\nVersion: 0.1.0\n",
        "dcp_fix-0.1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\n"
        "dcp_fix = dcp_fix.plugin.plugin:register\n",
    }.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
