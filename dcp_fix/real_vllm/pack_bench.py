"""What packing is worth in real vLLM: the same work with DCP_FIX_PACK=1 and without, one boot each.

    dcp-fix bench pack --tp 2 --dcp 2 --record FILE          on as many GPUs as --tp says

The model is four dense layers of random weights with the attention of GLM-5.2: 2048 selected keys, the latent of 512
and 64, 16 heads a rank, which is what TP4 leaves of its 64 (vLLM's fp8 path under DCP takes fewer than 32). So shares
of a step say nothing about a whole model, whose experts take time too; milliseconds a layer do.

    prefill     one prompt of 16384 tokens that nobody has seen, one new token: all layers, twice 8192 rows
    decode      64 requests over 2304 cached tokens each: a step of all, from two lengths of answer

It does not: compare answers (real_ladder.py), or time a kernel alone (bench/kernel_bench.py).
"""

import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dcp_fix.base import output
from dcp_fix.base.errors import UserError
from dcp_fix.base.process import stoppable
from dcp_fix.plugin import pack
from dcp_fix.real_vllm import boot, preflight, report
from dcp_fix.real_vllm.rungs import BLOCK, DEFAULTS, ENVIRONMENT, llm_arguments
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
        raise UserError("--dcp: name one size above 1, such as --tp 2 --dcp 2: at DCP1 there are no holes to pack")
    return main(tp, dcp[0], llm_arguments(llm), record_path)


def main(tp: int, dcp: int, llm: dict, record_path: Path | None) -> int:
    """Boot without and with packing, time, write the record, print; 0. UserError if it cannot run, or a boot fails."""
    vllm = preflight.check(tp, plugin=True)
    with tempfile.TemporaryDirectory(prefix="dcp-fix-pack-") as name, stoppable():
        told = arguments(model_folder(Path(name), tp), tp, dcp) | llm
        rows = [row for packed in (False, True) for row in timed(told, packed, Path(name))]
    sizes = {"tp": tp, "dcp": dcp, "layers": LAYERS}
    results = {"pack": rows, "vllm": vllm, **sizes, "llm": told | {"model": "-"}}
    output.deliver(record_path, make_record(machine.command_line(), results) if record_path else None, show, rows)
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


def timed(told: dict, packed: bool, folder: Path) -> list[dict]:
    """One boot's rows. Raises UserError for one that fails, or that did not pack where it was told to."""
    name = "packed" if packed else "as installed"
    job = {"llm": told, "works": [work | {"repeats": REPEATS, "vocabulary": VOCABULARY} for work in WORKS]}
    environment = DEFAULTS | {"HF_HUB_OFFLINE": "1"} | boot.environment() | ENVIRONMENT
    environment |= {pack.VARIABLE: "1" if packed else "0", "DCP_FIX_PLUGIN": "1"}
    with report.booting(name, folder / f"{boot.slug(name)}.log"):
        result = boot.run(name, job, environment, folder, LIMIT_S)
    if result.failure:
        raise UserError(f"{name}: {result.failure}")
    said = result.log["plugin"]
    if packed is not any(line.startswith("pack_and_cut applied") for line in said):
        raise UserError(f"{name}: the plugin says otherwise in vLLM's log: {'; '.join(said) or 'nothing'}")
    return rows_of(result.seconds, packed, said)


def rows_of(seconds: dict[str, list[float]], packed: bool, plugin: list[str]) -> list[dict]:
    """Milliseconds: of a prefill as they are, of a decode step from the difference of two lengths, pair by pair."""
    pairs = zip(seconds[f"decode {1 + STEPS}"], seconds["decode 1"], strict=True)
    times = {
        "prefill": [1e3 * one for one in seconds["prefill 1"]],
        "decode": [1e3 * (long - short) / STEPS for long, short in pairs],
    }
    return [
        {"work": work, "packed": packed, "ms": [round(one, 4) for one in ms], "plugin": plugin}
        for work, ms in times.items()
    ]


def show(rows: list[dict]) -> None:
    """A line for each work."""
    ms = {(row["work"], row["packed"]): statistics.median(row["ms"]) for row in rows}
    grid = Table("work", "as installed, ms", "packed, ms", "saved", "a layer, ms")
    for work in ("prefill", "decode"):
        before, after = ms[work, False], ms[work, True]
        grid.add_row(
            work, f"{before:.3f}", f"{after:.3f}", f"{1 - after / before:.0%}", f"{(before - after) / LAYERS:.3f}"
        )
    Console(highlight=False).print(grid)
