"""What packing is worth in real vLLM: the same work with DCP_FIX_PACK=1 and without, one boot each.

    dcp-fix bench --pack --tp 2 --dcp 2 --record FILE          on as many GPUs as --tp says

The model is four dense layers of random weights with the attention of GLM-5.2: 2048 selected keys, the latent of 512
and 64, 16 heads a rank, which is what TP4 leaves of its 64 (vLLM's fp8 path under DCP takes fewer than 32). So shares
of a step say nothing about a whole model, whose experts take time too; milliseconds a layer do.

    prefill     one prompt of 16384 tokens that nobody has seen, one new token: all layers, twice 8192 rows
    decode      64 requests over 2304 cached tokens each: a step of all, from two lengths of answer

It does not: compare answers (real_ladder.py), or time a kernel alone (bench/kernel_bench.py).
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dcp_fix.base import output, supervise
from dcp_fix.base.errors import UserError
from dcp_fix.base.process import stoppable
from dcp_fix.plugin import pack
from dcp_fix.real_vllm import boot_log, preflight
from dcp_fix.real_vllm.real_ladder import pair
from dcp_fix.real_vllm.rungs import BLOCK, DEFAULTS, ENVIRONMENT, Settings, serve_args
from dcp_fix.records import machine
from dcp_fix.records.records import make_record
from dcp_fix.tiny import corpus

HEADS_A_RANK, LAYERS, TOPK, VOCABULARY = 16, 4, 2048, 320
PROMPT, REQUESTS, CONTEXT, STEPS = 16384, 64, 2304, 256
REPEATS, LIMIT_S = 5, 900.0
WORKS = [
    {"name": "prefill", "requests": 1, "tokens": PROMPT, "new": [1], "fresh": True},
    {"name": "decode", "requests": REQUESTS, "tokens": CONTEXT, "new": [1, 1 + STEPS], "fresh": False},
]  # fmt: skip


def from_options(tp: int, dcp: tuple[int, ...], llm: list[str], record_path: Path | None) -> int:
    """`main` with the words of the command line. Raises UserError for other than one DCP size above 1."""
    if len(dcp) != 1 or dcp[0] < 2:
        raise UserError("--dcp: with --pack name one size above 1, such as --tp 2 --dcp 2: at DCP1 there are no holes")
    return main(tp, dcp[0], dict(pair(word) for word in llm), record_path)


def main(tp: int, dcp: int, llm: dict, record_path: Path | None) -> int:
    """Boot without and with packing, time, write the record, print; 0. Raises UserError if it cannot run, or a boot
    fails.
    """
    with tempfile.TemporaryDirectory(prefix="dcp-fix-pack-") as name, stoppable():
        folder = Path(name)
        model = model_folder(folder, tp)
        found = preflight.check(serve_args(Settings(tp=tp, dcp=dcp, model=str(model), llm=llm)), tp, plugin=True)
        told = arguments(model, tp, dcp) | llm
        rows = [row for packed in (False, True) for row in boot(told, packed, folder)]
    results = {
        "pack": rows,
        "vllm": found["vllm"],
        "tp": tp,
        "dcp": dcp,
        "layers": LAYERS,
        "llm": told | {"model": "-"},
    }
    output.deliver(record_path, record_path and make_record(machine.command_line(), results), show, rows)
    return 0


def model_folder(folder: Path, tp: int) -> Path:
    """A config.json: that of the checkpoint in the sizes above, dense and without weights."""
    config = json.loads((corpus.CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    config |= {
        "num_hidden_layers": LAYERS, "indexer_types": ["full"] * LAYERS, "mlp_layer_types": ["dense"] * LAYERS,
        "index_topk_pattern": "F" * LAYERS, "first_k_dense_replace": LAYERS, "index_topk": TOPK,
        "num_attention_heads": tp * HEADS_A_RANK, "num_key_value_heads": tp * HEADS_A_RANK, "hidden_size": 6144,
        "q_lora_rank": 2048, "qk_nope_head_dim": 128, "qk_head_dim": 192, "intermediate_size": 12288,
        "max_position_embeddings": 2 * PROMPT, "vocab_size": VOCABULARY,
    }  # fmt: skip
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def arguments(model: Path, tp: int, dcp: int) -> dict:
    """Arguments of `LLM`; decode steps run as CUDA graphs, as a server's do."""
    return {
        "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp, "dcp_comm_backend": "ag_rs", "kv_cache_dtype": "fp8_ds_mla",
        "block_size": BLOCK, "max_model_len": PROMPT + BLOCK, "max_num_batched_tokens": 8192,
        "max_num_seqs": REQUESTS, "gpu_memory_utilization": 0.5, "enable_prefix_caching": True,
        "compilation_config": {"cudagraph_capture_sizes": [1, REQUESTS]},
    }  # fmt: skip


def boot(told: dict, packed: bool, folder: Path) -> list[dict]:
    """One boot's rows. Raises UserError for one that fails, with what its log says."""
    name = "packed" if packed else "as installed"
    job, lines, log = (folder / f"{name.replace(' ', '-')}.{kind}" for kind in ("json", "jsonl", "log"))
    works = [work | {"repeats": REPEATS, "vocabulary": VOCABULARY} for work in WORKS]
    job.write_text(json.dumps({"llm": told, "works": works}), encoding="utf-8")
    lines.write_text("", encoding="utf-8")
    log.write_bytes(b"")
    environment = DEFAULTS | {"HF_HUB_OFFLINE": "1"} | preflight.environment() | ENVIRONMENT
    environment |= {pack.VARIABLE: "1" if packed else "0", "DCP_FIX_PLUGIN": "1"}
    events = []
    command = [sys.executable, "-P", "-m", "dcp_fix.real_vllm.timing_child", str(job), str(lines)]
    waiting = Console(stderr=True).status(f"{name}: vLLM boots and works")
    with waiting, supervise.running(command, log, environment) as child:
        failure = supervise.follow(child, lines, LIMIT_S, lambda event: event and events.append(event))
    said = boot_log.read(log)
    if failure:
        raise UserError(f"vLLM, {name}, {failure}: {said['error'] or boot_log.tail(log)[-1:]}")
    return rows_of([event for event in events if event["event"] == "timed"], packed, said["plugin"])


def rows_of(timed: list[dict], packed: bool, plugin: list[str]) -> list[dict]:
    """Milliseconds: of a prefill as they are, of a decode step from the difference of two lengths, pair by pair."""
    seconds = {(event["name"], event["new"]): event["seconds"] for event in timed}
    pairs = zip(seconds["decode", 1 + STEPS], seconds["decode", 1], strict=True)
    times = {
        "prefill": [1e3 * one for one in seconds["prefill", 1]],
        "decode": [1e3 * (long - short) / STEPS for long, short in pairs],
    }
    return [
        {"work": work, "packed": packed, "ms": [round(one, 4) for one in ms], "plugin": plugin}
        for work, ms in times.items()
    ]


def median(rows: list[dict], work: str, packed: bool) -> float:
    """Milliseconds of one work."""
    (row,) = [row for row in rows if (row["work"], row["packed"]) == (work, packed)]
    return statistics.median(row["ms"])


def show(rows: list[dict]) -> None:
    """A line for each work."""
    grid = Table("work", "as installed, ms", "packed, ms", "saved", "a layer, ms")
    for work in ("prefill", "decode"):
        before, after = (median(rows, work, packed) for packed in (False, True))
        saved = f"{1 - after / before:.0%}"
        grid.add_row(work, f"{before:.3f}", f"{after:.3f}", saved, f"{(before - after) / LAYERS:.3f}")
    Console(highlight=False).print(grid)
