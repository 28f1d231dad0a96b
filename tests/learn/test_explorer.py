"""The DCP explorer in a real browser: its arithmetic is ownership.py's, the keyboard moves it, it needs no network.

Needs Chromium, as test_browser.py does; without one only the text of the page is examined.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from dcp_fix import kv_cache, ownership
from dcp_fix.broken import norm_rope_skip_all_rows, norm_rope_skip_dense_rows
from dcp_fix.learn import plots
from dcp_fix.norm_rope import NormRopeInputs, fused_norm_rope
from tests import browser

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "dcp_explorer.html"
CHROMIUM = browser.find()
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(browser.NAMES)} is installed")
DEALS = [(size, interleave) for size in (1, 2, 4, 8) for interleave in (1, 2, 4, 8, 16, 32, 64)]
KERNELS = {"cache": fused_norm_rope, "dense": norm_rope_skip_dense_rows, "token": norm_rope_skip_all_rows}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.Browser(CHROMIUM, tmp_path_factory.mktemp("explorer") / "profile") as opened:
        opened.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        opened.open(PAGE.as_uri())
        opened.until("document.getElementById('summary')?.textContent", 30)
        yield opened
        assert not opened.failed, opened.failed


@pytest.fixture
def fresh(page):
    """The page with the settings that it opens with."""
    page.js("document.querySelector('form').reset(); draw()")
    return page


def computed(page, expression: str, **names):
    """A JavaScript expression over given values."""
    given = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
    return page.js(f"(() => {{ {given} return {expression}; }})()")


def test_the_page_fetches_nothing_and_has_the_colours_of_the_figures():
    text = PAGE.read_text()
    assert not re.search(r"""src=|href=|@import|url\(|fetch\(|XMLHttpRequest|import\(""", text)
    for rank, colour in enumerate(plots.RANKS):
        assert f".r{rank} {{ background: {colour}" in text
    assert f".written {{ background: {plots.WRITTEN}" in text and f".bad {{ background: {plots.BROKEN}" in text


@needs_browser
def test_the_arithmetic_is_that_of_ownership(page):
    positions = torch.arange(300)
    for size, interleave in DEALS:
        names = {"D": size, "I": interleave}
        owners = computed(page, "[...Array(300).keys()].map(p => dcp.owner(p, D, I))", **names)
        assert owners == ownership.owner(positions, size, interleave).tolist()
        for rank in range(size):
            names["r"] = rank
            slots = computed(page, "[...Array(300).keys()].map(p => dcp.slot(p, D, r, I))", **names)
            assert slots == ownership.localise(positions, size, rank, interleave).tolist()
            lengths = computed(page, "[...Array(300).keys()].map(n => dcp.localLength(n, D, r, I))", **names)
            assert lengths == ownership.local_length(positions, size, rank, interleave).tolist()
    assert computed(page, "[dcp.rowBytes(7), dcp.indexBytes(7)]") == [7 * kv_cache.ENTRY_BYTES, 7 * 132]


@needs_browser
@pytest.mark.parametrize("guard", KERNELS)
def test_the_rows_that_it_calls_written_are_those_that_the_kernel_writes(page, guard):
    size, interleave, rank = 4, 2, 1
    tokens = torch.arange(24)
    slots = ownership.localise(tokens, size, rank, interleave)
    q_out, kv_out, kpe_out = (torch.full((24, width), torch.nan) for width in (16, 512, 64))
    cache = torch.full((1, 64, 656), 127, dtype=torch.uint8)
    inputs = NormRopeInputs(
        tokens, torch.ones(24, 16), torch.ones(16), torch.ones(24, 512), torch.ones(512), torch.ones(24, 64),
        torch.ones(64, 64), 1e-5, slot_mapping=slots, kv_cache=cache, q_out=q_out, kv_out=kv_out, kpe_out=kpe_out,
    )  # fmt: skip
    KERNELS[guard](inputs)
    names = {"D": size, "I": interleave, "r": rank, "guard": guard}
    said = computed(page, "[...Array(24).keys()].map(p => dcp.written(p, D, r, I, guard, true))", **names)
    assert [row["query"] for row in said] == (~q_out.isnan()).all(-1).tolist()
    assert [row["key"] for row in said] == (~kv_out.isnan() & ~kpe_out.isnan().any(-1, keepdim=True)).all(-1).tolist()
    cached = (cache[0] != 127).any(-1)
    assert [row["cache"] for row in said] == [slot >= 0 and bool(cached[slot]) for slot in slots.tolist()]


def press(page, key: str, times: int = 1) -> None:
    """A key, as a user would press it."""
    codes = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "End": 35}
    for _ in range(times):
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])


@needs_browser
def test_the_keyboard_alone_moves_it(fresh):
    summary = "document.getElementById('summary').textContent"
    assert fresh.js(summary).startswith("Rows held by rank: 5, 5, 5, 5. Every row")
    fresh.js("document.activeElement.blur(); document.getElementById('ranks').focus()")
    press(fresh, "ArrowLeft")
    fresh.until(f"{summary}.startsWith('Rows held by rank: 10, 10.')", 10)
    press(fresh, "Tab")
    press(fresh, "ArrowRight", 2)  # interleave 4: 20 tokens are 12 and 8
    fresh.until(f"{summary}.startsWith('Rows held by rank: 12, 8.')", 10)
    press(fresh, "Tab")
    assert fresh.js("document.activeElement.id") == "tokens"


@needs_browser
def test_a_defect_is_counted_and_said(fresh):
    fresh.js("by('guard').value = 'token'; by('route').value = 'off'; draw()")
    said = fresh.js("document.getElementById('summary').textContent")
    assert "60 query rows over all ranks were never written" in said  # 20 tokens: 15 on each of four ranks
    assert "60 K rows were never written" in said and "240 of 320 pairs of head and selected row never meet" in said
    assert fresh.js("document.querySelectorAll('#rows .stale').length") == 120
    assert fresh.js("document.querySelectorAll('#heads .picked').length") == 16 * 20


@needs_browser
def test_a_link_can_carry_settings(page):
    page.open(f"{PAGE.as_uri()}#ranks=1&interleave=2&tokens=10")
    page.until("document.getElementById('summary').textContent.startsWith('Rows held by rank: 6, 4.')", 10)
