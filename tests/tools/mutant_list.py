"""The defects that `make mutants` puts in: (file, what stands there, what is put there, the tests that must notice)."""

OWNERSHIP = "tests/test_ownership.py"
KV_CACHE = "tests/test_kv_cache.py"
INDEXER = "tests/test_indexer.py"
ATTENTION = "tests/attention/test_attention.py"
WORKSPACE = "tests/test_workspace.py"
NORM_ROPE = "tests/norm_rope/test_norm_rope.py"
EQUALITY = "tests/records/test_records.py"
CACHED = "tests/engine/test_cached_rows.py"
ENGINE = "tests/engine/test_engine.py"
CHECKPOINT = "tests/engine/test_checkpoint.py"
CONFIG = "tests/engine/test_config.py"
MODEL = "tests/engine/test_model.py"
GROUP = "tests/ranks/test_group.py"
FAULTS = "tests/ranks/test_faults.py"
OUTPUT = "tests/base/test_output.py"
RECORDS = "tests/records/test_records.py"
CONSISTENCY = "tests/records/test_consistency.py"
BOUNDED = "tests/base/test_bounded.py"
PROCESS = "tests/base/test_process.py"
CLI = "tests/test_cli.py -k fault_of_ours or at_the_door"
NAN = "tests/test_cli.py -k whichever_typer"
EXACT = "tests/exact/test_exact.py -k attention_of_the_reference or every_dcp_size or flat_merge"
TINY = "tests/tiny/test_tiny.py -k held_out_is or hold or tokenizer or filler or never_shows"
COMBINE = "tests/combine/test_combine.py"
VERIFY = "tests/verify/test_verify.py -k another_token or twentieth"
DOCTOR = "tests/doctor/test_doctor.py -k off_by_one"
PROBES = "tests/doctor/test_probes.py -k wrong_lse or always_allocated"
COMPARE = "tests/compare/test_compare.py -k no_number_on_one_side"
HOSTILE = "tests/compare/test_hostile.py -k test_any"
LADDER = "tests/ladder/test_ladder.py -k repaired_means"

MUTANTS = [
    # --- who owns what ---
    ("dcp_fix/ownership.py", "return position // interleave % dcp_size", "return position % dcp_size", OWNERSHIP),
    ("dcp_fix/ownership.py", "* interleave + position % interleave", "* interleave", OWNERSHIP),
    ("dcp_fix/ownership.py", "dcp_size + dcp_rank) * interleave", "dcp_size + dcp_rank)", OWNERSHIP),
    (
        "dcp_fix/ownership.py",
        "_clamp(length % round_of - dcp_rank * interleave, 0, interleave)",
        "_clamp(length % round_of - dcp_rank * interleave, 0, round_of)",
        OWNERSHIP,
    ),
    (
        "dcp_fix/ownership.py",
        "round_of, length = dcp_size * interleave, _at_least_0(length)",
        "round_of = dcp_size * interleave",
        OWNERSHIP,
    ),
    (
        "dcp_fix/ownership.py",
        "return _at_least_0(shared_tokens) // unit * unit",
        "return shared_tokens // unit * unit",
        OWNERSHIP,
    ),
    ("dcp_fix/ownership.py", "mine = (topk_ids >= 0) & (owner", "mine = (topk_ids > 0) & (owner", OWNERSHIP),
    ("dcp_fix/ownership.py", "mine = (topk_ids >= 0) & (owner", "mine = (owner", OWNERSHIP),
    ("dcp_fix/ownership.py", "return torch.where(local >= 0, slots, NOT_OWNED)", "return slots", OWNERSHIP),
    ("dcp_fix/ownership.py", "local = local_indices.long()", "local = local_indices.int()", OWNERSHIP),
    ("dcp_fix/ownership.py", "range(0, max(lengths), chunk)", "range(0, max(lengths) + 1, chunk)", OWNERSHIP),
    ("dcp_fix/ownership.py", "unit = block_size * dcp_size", "unit = block_size", OWNERSHIP),
    (
        "dcp_fix/ownership.py",
        "return class_of(position, classes, interleave) // dcp_size",
        "return class_of(position, classes, interleave) % dcp_size",
        OWNERSHIP,
    ),
    # --- cache bytes ---
    ("dcp_fix/kv_cache.py", "TILE = 128", "TILE = 256", KV_CACHE),
    ("dcp_fix/kv_cache.py", ".clamp(min=FLT_MIN)", "", KV_CACHE),
    ("dcp_fix/kv_cache.py", "return x.clamp(-FP8_MAX, FP8_MAX).to", "return x.clamp(-FP8_MAX, 240.0).to", KV_CACHE),
    ("dcp_fix/kv_cache.py", "rows.float() * scale\n", "rows.float()\n", KV_CACHE),
    (
        "dcp_fix/kv_cache.py",
        "mine = slot_mapping >= 0\n    latent, rope",
        "mine = slot_mapping > 0\n    latent, rope",
        KV_CACHE,
    ),
    ("dcp_fix/kv_cache.py", "start = cache.storage_offset()", "start = 0", KV_CACHE),
    ("dcp_fix/kv_cache.py", "step = cache.stride(0)", "step = block_size * INDEX_BYTES", KV_CACHE),
    ("dcp_fix/kv_cache.py", "bits = x.view(torch.int32) + 0x007FFFFF", "bits = x.view(torch.int32)", KV_CACHE),
    ("dcp_fix/kv_cache.py", ".clamp(min=INDEX_AMAX_MIN)", "", KV_CACHE),
    # --- the fused kernel's reference ---
    (
        "dcp_fix/norm_rope/reference.py",
        "x.q_out.copy_(rms_norm(x.q, x.q_weight, x.eps))",
        "mine = slice(None) if x.slot_mapping is None else x.slot_mapping >= 0; "
        "x.q_out[mine] = rms_norm(x.q[mine], x.q_weight, x.eps).to(x.q_out.dtype)",
        NORM_ROPE,
    ),
    (
        "dcp_fix/norm_rope/reference.py",
        "rows = slice(None) if dense else x.slot_mapping >= 0",
        "rows = x.slot_mapping >= 0",
        NORM_ROPE,
    ),
    (
        "dcp_fix/norm_rope/reference.py",
        "interleaved=True)\n    if x.kv_out",
        "interleaved=False)\n    if x.kv_out",
        NORM_ROPE,
    ),
    (
        "dcp_fix/norm_rope/reference.py",
        "            x.topk_indices[: len(x.q)] = -1",
        "            x.topk_indices[:] = -1",
        NORM_ROPE,
    ),
    # --- indexer ---
    ("dcp_fix/indexer.py", "bits = (scores + 0.0).view", "bits = scores.view", INDEXER),
    ("dcp_fix/indexer.py", "ordered | (ID_MASK - ids.long())", "ordered | ids.long()", INDEXER),
    (
        "dcp_fix/indexer.py",
        "scores.masked_fill_(positions > query_positions[rows, None], -torch.inf)",
        "scores.masked_fill_(positions >= query_positions[rows, None], -torch.inf)",
        INDEXER,
    ),
    (
        "dcp_fix/indexer.py",
        "return (query_positions >= k).nonzero()",
        "return (query_positions > k).nonzero()",
        INDEXER,
    ),
    ("dcp_fix/indexer.py", ".relu_().mul_(weights)", ".mul_(weights)", INDEXER),
    (
        "dcp_fix/indexer.py",
        "ids = ids.masked_fill(ids == HOLE, last).sort(dim=1)[0]",
        "ids = ids.masked_fill(ids == HOLE, last)",
        INDEXER,
    ),
    # --- attention ---
    (
        "dcp_fix/attention/reference.py",
        "last = keys - tokens + start + torch.arange",
        "last = start + torch.arange",
        ATTENTION,
    ),
    ("dcp_fix/attention/reference.py", "(top + total.log()).squeeze(-1)", "top.squeeze(-1)", ATTENTION),
    (
        "dcp_fix/attention/reference.py",
        "ids = torch.where(ids >= 0, ids, ids[:, :1].clamp(min=0))",
        "ids = ids.clamp(min=0)",
        ATTENTION,
    ),
    (
        "dcp_fix/attention/reference.py",
        "return out.masked_fill_(empty[..., None], 0.0), lse",
        "return out, lse",
        ATTENTION,
    ),
    ("dcp_fix/combine/reference.py", "lse == math.inf, NEUTRAL[1]", "~(lse < math.inf), NEUTRAL[1]", COMBINE),
    ("dcp_fix/indexer.py", "return keys.masked_fill_(scores.isnan(), NAN_CANDIDATE)", "return keys", INDEXER),
    # --- workspace ---
    ("dcp_fix/workspace.py", "-(-topk // KEY_BLOCK)))", "topk // KEY_BLOCK))", WORKSPACE),
    ("dcp_fix/workspace.py", "fit // tokens - 1))", "fit // tokens))", WORKSPACE),
    ("dcp_fix/workspace.py", "splits if splits > 1 else 0, ranks", "splits, ranks", WORKSPACE),
    ("dcp_fix/workspace.py", "heads * (LATENT + 1) * 4", "heads * LATENT * 4", WORKSPACE),
    ("dcp_fix/workspace.py", "tokens * -(-heads // HEAD_BLOCK)", "tokens * (heads // HEAD_BLOCK or 1)", WORKSPACE),
    # --- engine ---
    ("dcp_fix/engine/engine.py", "self.pool.close(table, tokens[:start])", "self.pool.close(table, tokens)", CACHED),
    (
        "dcp_fix/engine/engine.py",
        "room = min(self.max_batch_tokens, unit - start % unit) if unit else self.max_batch_tokens",
        "room = self.max_batch_tokens",
        CACHED,
    ),
    ("dcp_fix/engine/engine.py", "            if self.attention.unit:\n", "            if False:\n", CACHED),
    (
        "dcp_fix/engine/sharded.py",
        "heads = -(-self.heads * self.dcp.size // workspace",
        "heads = -(-self.heads // workspace",
        CACHED,
    ),
    ("dcp_fix/engine/sharded.py", "            first += sum(lengths)\n", "", CACHED),
    ("dcp_fix/engine/blocks.py", "for block in reversed(table):", "for block in table:", CACHED),
    (
        "dcp_fix/engine/blocks.py",
        "self.known.pop(self.idle.pop(block), None)",
        "self.idle.pop(block)",
        ENGINE + " -k handed_on",
    ),
    (
        "dcp_fix/engine/blocks.py",
        "prefix_hit(len(tokens) - 1,",
        "prefix_hit(len(tokens),",
        ENGINE + " -k repeated_prompt",
    ),
    (
        "dcp_fix/engine/blocks.py",
        "        running, keys, unit = hashlib.sha256(), [], self.tokens_per_block\n"
        "        for end in range(unit, len(tokens) + 1, unit):\n",
        "        keys, unit = [], self.tokens_per_block\n        for end in range(unit, len(tokens) + 1, unit):\n"
        "            running = hashlib.sha256()\n",
        ENGINE + " -k counts_from",
    ),
    ("dcp_fix/engine/engine.py", "if self.config.ends(tokens[-1]) or len", "if len", ENGINE + " -k end_token"),
    ("dcp_fix/engine/engine.py", "        check_widths(config)\n", "", ENGINE + " -k fit_the_cache"),
    (
        "dcp_fix/engine/engine.py",
        "if rows > self.max_length:",
        "if rows > self.max_length + 1:",
        ENGINE + " -k longer_than_the_cache",
    ),
    (
        "dcp_fix/engine/scratch.py",
        "            view.copy_(self.noise[name][:rows])",
        "            pass",
        ENGINE + " -k zeros_and_noise",
    ),
    (
        "dcp_fix/engine/shard.py",
        "return pad(mine, (0, 0, 0, rows - mine.shape[0]))",
        "return mine",
        ENGINE + " -k shards_add_up",
    ),
    ("dcp_fix/engine/model.py", "/ (picked.sum(-1, keepdim=True) + 1e-20) ", "", MODEL),
    ("dcp_fix/engine/model.py", "* self.config.routed_scaling_factor", "", MODEL),
    # --- what is read ---
    ("dcp_fix/engine/config.py", "return token in (ids if", "return token in (ids[:1] if", CONFIG),
    (
        "dcp_fix/engine/config_schema.py",
        'type: Literal["default"] = only("default")  # the older name',
        "type: Any = None",
        CONFIG,
    ),
    (
        "dcp_fix/engine/config_schema.py",
        '    hidden_act: Literal["silu"] = only("silu")',
        "    hidden_act: Any = None",
        CONFIG,
    ),
    (
        "dcp_fix/engine/config_schema.py",
        "    norm_topk_prob: Yes = only(True)",
        "    norm_topk_prob: Any = None",
        CONFIG,
    ),
    (
        "dcp_fix/engine/config_schema.py",
        "    rope_interleave: Yes = only(True)",
        "    rope_interleave: Any = None",
        CONFIG,
    ),
    (
        "dcp_fix/engine/config_schema.py",
        "        if found is not value:",
        "        if found != value and False:",
        CONFIG,
    ),
    ("dcp_fix/engine/config_schema.py", "if self.num_experts_per_tok > self.n_routed_experts:", "if False:", CONFIG),
    (
        "dcp_fix/engine/config_schema.py",
        "return self.rope_theta if nested is None else nested",
        "return nested",
        CONFIG,
    ),
    ("dcp_fix/base/schema.py", 'extra="forbid"', 'extra="ignore"', CONFIG),
    ("dcp_fix/base/schema.py", "strict=True, frozen", "strict=False, frozen", CONFIG),
    ("dcp_fix/engine/checkpoint.py", "    if unread:\n", "    if False:\n", CHECKPOINT),
    ("dcp_fix/engine/checkpoint.py", "        if dtype not in DTYPES:", "        if False:", CHECKPOINT),
    ("dcp_fix/engine/checkpoint.py", "if not weight.isfinite().all():", "if weight.isnan().all():", CHECKPOINT),
    ("dcp_fix/base/bounded.py", "    if kind != stat.S_IFREG:", "    if kind == stat.S_IFDIR:", BOUNDED),
    ("dcp_fix/base/bounded.py", "if len(data) > most:", "if len(data) > most + 1:", BOUNDED),
    ("dcp_fix/base/bounded.py", "    if len(text) > DIGITS:", "    if len(text) > 4000:", BOUNDED),
    ("dcp_fix/base/bounded.py", "    if len(values) < len(pairs):", "    if False:", BOUNDED),
    ("dcp_fix/base/bounded.py", "except RecursionError:", "except KeyError:", BOUNDED),
    ("dcp_fix/base/errors.py", "c if c.isprintable() else ascii(c)[1:-1]", "c", BOUNDED),
    # --- what is written ---
    ("dcp_fix/base/output.py", "            os.fchmod(descriptor, mode)\n", "", OUTPUT),
    ("dcp_fix/base/output.py", "NEW_MODE & ~mask", "NEW_MODE", OUTPUT),
    (
        "dcp_fix/base/output.py",
        "replace(Path(os.path.realpath(path)), text",
        "replace(Path(path), text",
        OUTPUT,
    ),
    (
        "dcp_fix/base/output.py",
        "        if stat.S_ISREG(mode):\n            replace(",
        "        if True:\n            replace(",
        OUTPUT,
    ),
    ("dcp_fix/base/output.py", "        os.unlink(name)\n        raise", "        raise", OUTPUT),
    (
        "dcp_fix/base/output.py",
        "        except UserError as error:\n            failed = error",
        "        except UserError as error:\n            raise error",
        OUTPUT,
    ),
    (
        "dcp_fix/base/process.py",
        "    except (BrokenPipeError, SystemExit):",
        "    except SystemExit:",
        OUTPUT,
    ),
    ("dcp_fix/base/process.py", 'stream.reconfigure(errors="backslashreplace")', "pass", OUTPUT),
    ("dcp_fix/cli.py", "        return FAULT\n", "        return 1\n", CLI),
    ("dcp_fix/cli.py", "seconds is not None and math.isnan(seconds)", "False", NAN),
    # --- records ---
    ("dcp_fix/records/records.py", "ge=SCHEMA_VERSION, le=SCHEMA_VERSION", "ge=SCHEMA_VERSION", RECORDS),
    ("dcp_fix/records/records.py", ', pattern="^[0-9a-f]{40}$"', "", RECORDS),
    ("tests/records/consistency.py", "if found[key] != value", "if False", CONSISTENCY),
    ("tests/records/consistency.py", "apart / 2 - eps <= ulps * eps <= 2 * apart + eps", "ulps >= 0", CONSISTENCY),
    ("tests/records/consistency.py", '"logits_identical": row["logits"] == reference["logits"],', "", CONSISTENCY),
    ("dcp_fix/base/equality.py", "return power_of_two * info.eps", "return power_of_two * info.eps / 2", EQUALITY),
    (
        "dcp_fix/base/equality.py",
        "a.dtype != b.dtype or a.shape != b.shape):\n        return False",
        "a.shape != b.shape):\n        return False",
        EQUALITY,
    ),
    ("dcp_fix/base/equality.py", "end = None if len(a) == len(b) else min(len(a), len(b))", "end = None", EQUALITY),
    # --- ranks ---
    ("dcp_fix/ranks/group.py", "    return total.to(dtype)\n", "    return total\n", GROUP),
    ("dcp_fix/ranks/group.py", "for part in parts[1:]:", "for part in reversed(parts[1:]):", GROUP),
    # --- exact mode, the corpus, the ladder ---
    (
        "dcp_fix/exact/reference.py",
        "out.unflatten(0, (2, -1)), lse.unflatten(0, (2, -1))",
        "out.unflatten(0, (-1, 2)).transpose(0, 1), lse.unflatten(0, (-1, 2)).transpose(0, 1)",
        EXACT,
    ),
    (
        "dcp_fix/exact/reference.py",
        "        keep = (top - new_top).exp_()",
        "        keep = torch.ones_like(top)",
        EXACT,
    ),
    ("dcp_fix/tiny/corpus.py", "% HELD_OUT == 0", "% HELD_OUT == 1", TINY),
    (
        "dcp_fix/combine/reference.py",
        "key = (name, *row, dtype, like.device)",
        "key = (name, dtype, like.device)",
        COMBINE,
    ),
    ("dcp_fix/engine/exact_attention.py", "classes, BLOCK * classes\n", "classes, BLOCK * dcp.size\n", CACHED),
    # --- verify, compare, the doctor ---
    ("dcp_fix/verify/free.py", "LOGITS_APART = 0.05", "LOGITS_APART = 0.1", VERIFY),
    ("dcp_fix/verify/free.py", "min(first_token + 1,", "min(first_token,", VERIFY),
    ("dcp_fix/compare/compare.py", "(x is None) != (y is None)", "x is None and y is None", COMPARE),
    ("dcp_fix/compare/answers.py", "Field(ge=0, lt=1 << 63)", "Field(lt=1 << 63)", HOSTILE),
    ("dcp_fix/compare/answers.py", "except (ValueError, RecursionError):", "except RecursionError:", HOSTILE),
    (
        "dcp_fix/doctor/probes/kernel.py",
        "if slot >= 0}\n    lost",
        "if slot > 0}\n    lost",
        DOCTOR,
    ),
    (
        "dcp_fix/doctor/probes/kernel.py",
        'outside the batch overwritten"] if (topk != UNTOUCHED).any()',
        'outside the batch overwritten"] if ((topk != UNTOUCHED) & (topk != -1)).any()',
        DOCTOR,
    ),
    (
        "dcp_fix/doctor/probes/merge.py",
        "elif not torch.allclose(lse[row]",
        "elif False and not torch.allclose(lse[row]",
        PROBES,
    ),
    (
        "dcp_fix/doctor/probes/workspace.py",
        "always_bytes(rows, heads) / 2",
        "always_bytes(rows, heads) * 2",
        PROBES,
    ),
    # --- whose tests start processes ---
    ("dcp_fix/base/process.py", " if signal.getsignal(n) is not signal.SIG_IGN]", "]", PROCESS),
    (
        "dcp_fix/base/process.py",
        "stop.number if isinstance(stop, Stopped) else signal.SIGINT",
        "signal.SIGINT",
        PROCESS,
    ),
    ("dcp_fix/cli.py", "            leave(status_of(stop))", "            status = status_of(stop)", PROCESS),
    ("dcp_fix/ranks/place.py", " and low <= int(text) <= high)", ")", FAULTS + " -k no_place"),
    (
        "dcp_fix/ranks/launch.py",
        "socket.create_server((HOST, 0))",
        'socket.create_server(("0.0.0.0", 0))',
        FAULTS + " -k reach_the_store",
    ),
    (
        "dcp_fix/ranks/launch.py",
        "return status_of(stop_asked)\n    finally",
        "return 130\n    finally",
        FAULTS + " -k says_which",
    ),
    (
        "dcp_fix/ladder/ladder.py",
        "return bool(first and last) and not any(first) and all(equal == prompts for equal in last)",
        "return bool(first and last) and all(equal == prompts for equal in last)",
        LADDER,
    ),
]
