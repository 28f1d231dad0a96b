"""attention_flashmla.py: which vLLM folder it takes, and what it refuses. Its use is in test_attention_triton.py."""

import pytest
import torch

from dcp_fix import attention_flashmla
from dcp_fix.errors import UserError


def test_folders_that_hold_no_flashmla_are_refused(tmp_path):
    with pytest.raises(UserError, match="no vllm/_flashmla_C.abi3.so in it; name a folder"):
        attention_flashmla.load(tmp_path)
    library = tmp_path / attention_flashmla.LIBRARY
    library.parent.mkdir()
    library.write_bytes(b"not a library")
    with pytest.raises(UserError, match="cannot be loaded"):
        attention_flashmla.load(tmp_path)


def test_it_pays_only_where_one_is_in_use_and_it_was_measured_faster():
    assert not attention_flashmla.pays(64, torch.bfloat16)
    attention_flashmla.use(attention_flashmla.FlashMLA(None))
    try:
        pays = {heads: attention_flashmla.pays(heads, torch.bfloat16) for heads in (16, 32, 33, 64)}
        assert pays == {16: False, 32: False, 33: True, 64: True} and not attention_flashmla.pays(64, torch.float16)
    finally:
        attention_flashmla.use(None)
    assert not attention_flashmla.pays(64, torch.bfloat16)


def test_heads_are_padded_with_zeros():
    padded = attention_flashmla.padded(torch.ones(2, 20, 576))
    assert padded.shape == (2, 64, 576) and padded[:, :20].eq(1).all() and padded[:, 20:].eq(0).all()
    assert attention_flashmla.padded(torch.ones(2, 64, 576)).shape == (2, 64, 576)
