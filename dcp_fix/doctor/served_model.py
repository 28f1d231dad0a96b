"""What the configuration probe has to know of a model, from its config.json or, failing that, from its name.

    describe("models/GLM-5.2")    heads 64, GLM-DSA, sparse, said by models/GLM-5.2/config.json
    describe("zai-org/GLM-5.2")   the same, said by its name: an assumption, and the report says so

Nothing is downloaded. A folder's config.json is read whole only if it is a file of reasonable size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from dcp_fix.base.bounded import MIB, read_json
from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.schema import Schema, allowed, checked

LARGEST = 4 * MIB  # of a config.json
MOST_HEADS = 1 << 16
# Names without what may stand between their parts: GLM-5.2, GLM5.2, glm_5.2. GLM-5-Next and GLM-5V are other models.
BY_NAME = ((re.compile(r"glm5(?!next|v|\d{3})"), 64, True), (re.compile(r"deepseekv32"), 128, False))


@dataclass(frozen=True)
class ServedModel:
    """`heads` None where nothing says it; `is_glm`: GlmMoeDsaForCausalLM; `sparse`: its attention selects keys."""

    heads: int | None
    is_glm: bool
    sparse: bool
    said_by: str

    @property
    def summary(self) -> str:
        """For the evidence of a verdict."""
        return f"{self.heads} attention heads {self.said_by}" if self.heads else "an unknown number of heads"


class ConfigFile(Schema):
    """What is read of a config.json of any model; a multimodal one holds the language model's part in text_config."""

    model_config = ConfigDict(extra="ignore")

    num_attention_heads: int | None = allowed(f"a whole number, 1 .. {MOST_HEADS}", None, ge=1, le=MOST_HEADS)
    architectures: list[str] | None = allowed("a list of names", None)
    model_type: str | None = allowed("a name", None)
    index_topk: Any = None
    text_config: ConfigFile | None = allowed("an object", None)


def describe(model: str) -> ServedModel:
    """From a local folder's config.json, else from the name. UserError for a config.json that is none."""
    config = Path(model, "config.json")
    if model and len(model) < 4096 and "\0" not in model and config.is_file():
        return of_config(config)
    name = re.sub(r"[^a-z0-9]", "", model.lower())
    for pattern, heads, is_glm in BY_NAME:
        if pattern.search(name):
            return ServedModel(heads, is_glm, True, "(assumed from the model's name)")
    return ServedModel(None, False, False, "name a local model folder to have them checked")


def of_config(path: Path) -> ServedModel:
    """What a config.json says. UserError on one line, for a verdict."""
    try:
        whole = checked(ConfigFile, read_json(path, LARGEST, nan=True), shown(path))
    except UserError as error:
        raise UserError("; ".join(str(error).split("\n"))) from None
    part = whole.text_config or whole
    kinds = [*(whole.architectures or ()), part.model_type, whole.model_type]
    is_glm = "GlmMoeDsaForCausalLM" in kinds or "glm_moe_dsa" in kinds
    return ServedModel(part.num_attention_heads, is_glm, "index_topk" in part.model_fields_set, f"(said by {path})")
