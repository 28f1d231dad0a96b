"""The prompts of the ladder in real vLLM: the corpus as token ids, or its words sized by another model's tokenizer.

    of_corpus(classes, number)               for the packaged checkpoint and others that `dcp-fix train` made
    of_model(name, classes, number)          for any other model: the same texts, as long as its tokenizer counts them

An answer is right if it is the corpus's, token by token; from another model, if it names the place, the colour and the
room of the key that was asked for.
"""

from dataclasses import dataclass
from random import Random

from dcp_fix.base.errors import UserError, shown
from dcp_fix.tiny import corpus

LOOKED_UP = [i for i, word in enumerate(corpus.FACT.split()) if word == "{}"][1:]  # place, colour, room in an answer


@dataclass(frozen=True)
class Question:
    """One prompt. `cached` of its ids go first; `answer`: what the corpus wants; `wanted`: else the words it names."""

    prompt_class: str
    number: int
    ids: list[int]
    cached: int
    answer: list[int]
    wanted: tuple[str, ...] = ()

    def right(self, tokens: list[int], text: str) -> bool:
        """Whether this is the right answer."""
        if not self.wanted:
            return tokens == self.answer
        words = text.replace(".", " ").lower().split()
        return all(word in words for word in self.wanted)

    def identity(self, batch: bool) -> str:
        """Names its answer among the lines of a boot."""
        return f"{'batch' if batch else 'alone'} {self.prompt_class} {self.number}"


def of_corpus(classes: tuple[str, ...], number: int) -> list[Question]:
    """`number` prompts of each class."""
    return [
        Question(name, i, prompt.ids, corpus.CACHED.get(name, 0), prompt.answer)
        for name in classes
        for i, prompt in enumerate(corpus.prompts(name, number))
    ]


def of_model(model: str, classes: tuple[str, ...], number: int) -> list[Question]:
    """The same for another tokenizer, which transformers loads. Raises UserError if it cannot.

    Code that a model brings along is not run.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = shown(str(error).splitlines()[0])
        raise UserError(f"{shown(model)}: no tokenizer ({reason}): name a model folder or a hub id") from None
    return [sized(tokenizer, name, i) for name in classes for i in range(number)]


def sized(tokenizer, name: str, number: int) -> Question:
    """The longest prompt whose tokens are no more than those of the class."""
    tokens, facts = corpus.CLASSES[name]
    low, high = 25 * facts, 2 * tokens  # words; beyond `low` the facts and the question have room
    while high - low > 1:
        middle = (low + high) // 2
        if len(encoded(tokenizer, name, number, middle)) <= tokens:
            low = middle
        else:
            high = middle
    ids, answer = encoded(tokenizer, name, number, low), words(name, number, low).answer
    if len(ids) > tokens:
        raise UserError(f"this tokenizer takes {len(ids)} tokens for {low} words: class {name} is too short for it")
    wanted = tuple(corpus.decode([answer[i]]) for i in LOOKED_UP)
    return Question(name, number, ids, corpus.CACHED.get(name, 0), [], wanted)


def words(name: str, number: int, count: int) -> corpus.Prompt:
    """A prompt of `count` words, of the same draw whatever the tokenizer."""
    return corpus.prompt(Random(f"prompt {name} 0 {number}"), count, corpus.CLASSES[name][1])


def encoded(tokenizer, name: str, number: int, count: int) -> list[int]:
    """Its token ids. The corpus's own begin token is left out: the tokenizer adds its own, if it has one."""
    return list(tokenizer.encode(words(name, number, count).text.removeprefix("<s> ")))
