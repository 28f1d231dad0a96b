"""What compare asks, and how it is to be answered: plain English words (tiny/corpus.py) of three classes.

A class is named after its words; a tokenizer may count some more tokens, and the report says how many were sent.
"""

import hashlib
import json
from dataclasses import dataclass
from random import Random

from dcp_fix.tiny import corpus

CLASSES = {name: (*corpus.CLASSES[name], corpus.CACHED.get(name, 0)) for name in ("512", "1536", "1024+1536")}
MARGIN = 16  # words more in the part to be cached, since only whole blocks are
NEW_TOKENS = 32
# Both numbers: a model's generation_config may bring its own. A special token must not vanish from the text.
SAMPLING = {"temperature": 0, "repetition_penalty": 1.0, "skip_special_tokens": False}


@dataclass(frozen=True)
class Prompt:
    """One prompt; `prefix`, if any, is its beginning, to be cached by a request of its own."""

    name: str
    text: str
    prefix: str = ""

    @property
    def digest(self) -> str:
        """SHA256 of all that decides the answer."""
        asked = json.dumps([len(self.prefix), self.text, NEW_TOKENS, SAMPLING])
        return hashlib.sha256(asked.encode()).hexdigest()


def prompts(pairs: int | None = None) -> list[Prompt]:
    """One prompt of each class, or `pairs` prompts that take the classes in turn."""
    kinds = list(CLASSES)
    return [prompt(kinds[number % len(kinds)], number // len(kinds)) for number in range(pairs or len(kinds))]


def prompt(kind: str, turn: int = 0) -> Prompt:
    """A prompt of a class, always the same."""
    name = f"{kind} #{turn}" if turn else kind
    size, facts, cached = CLASSES[kind]
    ids = corpus.prompt(Random(f"compare {name}"), size + 1, facts).ids
    words = corpus.decode(ids[1:]).split()  # without <s>: whether there is one is the tokenizer's business
    return Prompt(name, " ".join(words), " ".join(words[: cached + MARGIN]) if cached else "")
