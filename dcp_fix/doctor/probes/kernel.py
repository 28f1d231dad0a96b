"""Three probes of the target's own fused norm/RoPE kernel, run on poisoned buffers.

Every case runs twice: with all slots owned (the control, checked against the formulas below), then with some or all
slots negative, as a rank sees them under DCP. A control that fails means that this is not the kernel we know, and the
answer is `not-run`; a case that fails while its control passes is the defect.

    query   q_out[t]   = q[t] / sqrt(mean(q[t]^2) + eps) * w                                  every row
    dense K kv_out[t]  = the same of the latent; kpe_out[t] = interleaved RoPE of k_pe[t]      every row
    caches  the slot's bytes                                                                  only where slot >= 0
    top-k   topk[t, :] = -1                                                                   every row, indexer layers

The values inside the caches are not checked, only which bytes were touched. kernel_run.py holds the buffers.
"""

from dataclasses import replace

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.kernel_run import MIXED, NEGATIVE, TOKENS, TOPK, UNTOUCHED, Case, Launch, check_signature


def wrong_rows(got, want) -> tuple[list[int], list[int]]:
    """(rows that hold poison, rows that hold another value than `want`)"""
    unwritten = got.float().isnan().any(dim=-1)
    tolerance = 1e-4 if got.dtype == torch.float32 else 0.02
    wrong = ((got.float() - want).abs() > tolerance * (1 + want.abs())).any(dim=-1) & ~unwritten
    return unwritten.nonzero().flatten().tolist(), wrong.nonzero().flatten().tolist()


# --- checks: a list of sentences, empty when all is well --------------------------------------------------------------


def describe(what, rows) -> list[str]:
    """Sentences about the rows that `wrong_rows` found."""
    named = zip(rows, ("never written", "wrong"), strict=True)
    return [f"{what} of token{'s' * (len(at) > 1)} {', '.join(map(str, at))} {how}" for at, how in named if at]


def check_query(launch: Launch) -> list[str]:
    """Every query row holds its norm."""
    return describe("query row", wrong_rows(launch.q_out, launch.expected_query()))


def check_dense(launch: Launch) -> list[str]:
    """Every dense row holds the normed latent and the rotated key."""
    latent, rotated = launch.expected_dense()
    return describe("kv_c_out row", wrong_rows(launch.arguments["kv_c_out"], latent)) + describe(
        "k_pe_out row", wrong_rows(launch.arguments["k_pe_out"], rotated)
    )


def check_owned(launch: Launch) -> list[str]:
    """Every owned slot got its entry."""
    owned = {slot for slot in launch.case.slots or () if slot >= 0}
    lost = [(name, sorted(owned - touched)) for name, touched in touched_slots(launch).items()]
    return [f"{name} cache not written at owned slots {slots}" for name, slots in lost if slots]


def check_writes(launch: Launch) -> list[str]:
    """As `check_owned`; and nothing else was written, and the top-k rows are as they should be."""
    owned = {slot for slot in launch.case.slots or () if slot >= 0}
    extra = [(name, sorted(touched - owned)) for name, touched in touched_slots(launch).items()]
    found = [f"{name} cache written outside the owned slots (at {slots})" for name, slots in extra if slots]
    return check_owned(launch) + found + check_topk(launch.topk.cpu(), launch.case.indexer)


def touched_slots(launch: Launch) -> dict[str, set[int]]:
    """{cache: slots with a changed byte}, of the caches that were given."""
    touched = {}
    if launch.latent is not None:
        touched["latent"] = launch.touched(launch.latent, launch.latent.shape[-1])
    if launch.index is not None:
        touched["indexer"] = launch.touched_index()
    return touched


def check_topk(topk, indexer: bool) -> list[str]:
    """Indexer layers reset the rows of the batch and no others; shared layers reset nothing."""
    if not indexer:
        return ["top-k entries of a shared layer overwritten"] if (topk != UNTOUCHED).any() else []
    reset = (topk[:TOKENS, :TOPK] == -1).all(dim=1)
    found = [] if reset.all() else [f"top-k rows {(~reset).nonzero().flatten().tolist()} not reset"]
    topk[:TOKENS, :TOPK] = UNTOUCHED
    return found + (["top-k entries outside the batch overwritten"] if (topk != UNTOUCHED).any() else [])


# --- the three probes -------------------------------------------------------------------------------------------------


def run_cases(launcher, cases, check, device, progress, known=None) -> list[str]:
    """Sentences about the cases that fail. `known` (by default `check`) decides whether a control behaves as it should;
    what `check` says of a control beyond that is a finding like any other."""
    found, controlled = [], set()
    for case in cases:
        control = case.control()
        if control not in controlled:
            progress(f"{case.name} (control)", control=True)
            found += run_control(launcher, case, check, known or check, device)
            controlled.add(control)
        progress(case.name)
        result = attempt(lambda case=case: check(Launch(launcher, case, device)))
        messages = [f"raises {one_line(result.raised)}"] if result.raised else result.value
        found += [f"{case.name}: {message}" for message in messages]
    return found


def run_control(launcher, case: Case, check, known, device) -> list[str]:
    """The control of `case`: NotRun if `known` finds fault, else what `check` says of it."""
    launched = attempt(lambda: Launch(launcher, case.control(), device))
    strange = [f"raises {one_line(launched.raised)}"] if launched.raised else known(launched.value)
    if strange:
        raise NotRun(f"the control of '{case.name}', every slot owned, fails: nothing can be said ({strange[0]})")
    return [f"{case.name} (every slot owned): {message}" for message in check(launched.value)]


def query_rows(launcher, device, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    dense = "kv_c_out" in check_signature(launcher)
    cases = [
        Case("mixed slots", MIXED, far_positions=True),
        Case("all slots negative", NEGATIVE, dense=dense),
        Case("mixed slots, shared layer", MIXED, indexer=False, latent_cache="fp8_ds_mla"),
    ]
    found = run_cases(launcher, cases, check_query, device, progress)
    return judged(found, f"{len(cases)} launches with mixed and all-negative slots: every query row holds RMSNorm(q)")


def k_rows(launcher, device, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    if "kv_c_out" not in check_signature(launcher):
        return "not-applicable", (
            "fused_norm_rope of this release has no kv_c_out and k_pe_out: there are no dense K rows to leave unwritten"
        )
    cases = [
        Case("mixed slots", MIXED, dense=True),
        Case("all slots negative, fp8_ds_mla", NEGATIVE, dense=True, latent_cache="fp8_ds_mla"),
        Case("mixed slots, shared layer, fp8", MIXED, dense=True, indexer=False, latent_cache="fp8"),
        Case("no slot mapping (memory profiling)", None, dense=True),
    ]
    found = run_cases(launcher, cases, check_dense, device, progress)
    good = "kv_c_out and k_pe_out hold the normed latent and the rotated key in every row"
    return judged(found, f"{len(cases)} launches: {good}")


def owner_only_writes(launcher, device, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    dense = "kv_c_out" in check_signature(launcher)
    cases = [
        Case("mixed slots", MIXED, dense=dense),
        Case("mixed slots, split-half RoPE, fp8", MIXED, latent_cache="fp8", interleaved=False, dense=dense),
        Case("all slots negative, fp8_ds_mla", NEGATIVE, latent_cache="fp8_ds_mla", dense=dense),
        Case("all slots negative, no dense rows", NEGATIVE),
        Case("mixed slots, shared layer", MIXED, indexer=False, dense=dense),
        Case("no slot mapping (memory profiling)", None),
        Case("mixed slots, latent cache written by the caller", MIXED, latent_cache=None, dense=dense),
    ]
    if "index_k_out" in check_signature(launcher):
        cases.append(Case("mixed slots, indexer cache written by the caller", MIXED, indexer_cache=False, dense=True))
        none = Case("all rows handed to the caller, no cache given", None, latent_cache=None, indexer_cache=False)
        cases.append(replace(none, dense=True, index_out=True))
    found = run_cases(launcher, cases, check_writes, device, progress, known=check_owned)
    good = "caches unchanged outside owned slots, top-k reset, shared layers untouched"
    return judged(found, f"{len(cases)} launches: {good}")
