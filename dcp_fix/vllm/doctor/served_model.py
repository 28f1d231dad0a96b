"""What the configuration probe has to know of a model, from its config.json or, failing that, from its name.

    describe("models/GLM-5.2")    heads 64, GLM-DSA, sparse, said by models/GLM-5.2/config.json
    describe("zai-org/GLM-5.2")   the same, said by its name: an assumption, and the report says so

Nothing is downloaded. A folder's config.json is read whole only if it is a file of reasonable size.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.errors import UserError

LONGEST = 1 << 22  # bytes of a config.json
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
    """What a config.json says; a multimodal one holds the language model's part in text_config."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(LONGEST))
        text = content.get("text_config", content)
        heads = text.get("num_attention_heads")
        kinds = [*(content.get("architectures") or ()), text.get("model_type"), content.get("model_type")]
    except (ValueError, AttributeError, TypeError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not a model's config.json ({' '.join(str(error).split())[:200]})") from None
    if heads is not None and (type(heads) is not int or not 0 < heads <= MOST_HEADS):
        raise UserError(f"{path}: num_attention_heads is {str(heads)[:40]!r}; a whole number from 1 on is wanted")
    is_glm = "GlmMoeDsaForCausalLM" in kinds or "glm_moe_dsa" in kinds
    return ServedModel(heads, is_glm, "index_topk" in text, f"(said by {path})")
