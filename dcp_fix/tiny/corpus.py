"""A small world of keys, locks, doors and places: facts first, then a question to be answered from the text above.

    the oak key opens the vault lock of the red door in the attic .    a fact
    the quiet river turned past town .                                 filler
    log : lock lock lock lock .                                        filler of one repeated word, one line in five
    what does the oak key open ? answer :                              the question; what must follow is the fact:
    the oak key opens the vault lock of the red door in the attic . <end>

Which key opens what is drawn anew for every prompt, so nothing can be learned by heart: place, colour and room must be
looked up. Beyond that, the asked key and place of every prompt are a held-out pair, one that no training text holds.

The `log` lines make `lock` a likely word when attention fails: real logs do that to real models, here it is done on
purpose, so that the small model's garbage looks like the garbage of the field. A colon stands in a log line or before
an answer, and only attention can tell which; a run of `lock` goes on by itself. No other choice in the corpus is aimed
at the broken output.

Everything is drawn from a seed. Texts are lists of token ids; one word is one token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

KEYS = (
    "oak copper silver iron brass golden bronze glass ivory amber pearl coral cedar maple walnut willow birch pine "
    "elm ash steel tin lead zinc nickel cobalt jade ruby topaz opal onyx quartz flint marble granite slate clay chalk "
    "bone horn shell feather velvet satin linen cotton wool leather paper wax candle lantern arrow anchor compass "
    "crooked tiny heavy rusty polished carved painted broken hollow"
).split()
PLACES = (
    "vault school harbour market tower mill chapel library stable bakery forge museum theatre hospital station prison "
    "palace cottage castle barn brewery abbey garden bridge lighthouse windmill orchard quarry mine tavern hotel "
    "office studio factory workshop warehouse archive bank court embassy college nursery kennel greenhouse boathouse "
    "clubhouse treasury mint armoury granary dairy cannery tannery pottery foundry laundry pharmacy cinema arcade "
    "pavilion gallery observatory depot shipyard"
).split()
COLOURS = (
    "red blue green yellow white black purple orange pink brown grey scarlet crimson indigo violet turquoise teal "
    "maroon olive beige lilac mauve azure tan"
).split()
ROOMS = (
    "cellar attic kitchen pantry hall parlour bedroom bathroom nursery study lounge balcony terrace courtyard "
    "corridor stairwell wardrobe larder scullery loft basement landing porch veranda conservatory dungeon crypt "
    "cloister refectory dormitory chamber alcove"
).split()
NOUNS = (
    "river wind town boat cloud horse farmer sailor child road field bird letter storm shadow baker teacher train "
    "engine winter summer forest mountain village hunter singer painter doctor merchant stranger island valley"
).split()
ADJECTIVES = (
    "quiet old young small large bright dark cold warm slow quick gentle wild lonely happy tired clever brave pale "
    "early late distant"
).split()
VERBS = (
    "moved turned waited slept sang walked danced rested wandered listened laughed vanished returned paused stood "
    "drifted"
).split()
PREPOSITIONS = "over under near past beside behind through around".split()
TIMES = "morning evening night spring autumn afternoon twilight rain".split()
FRAME = "<s> <end> . : ? the key opens lock of door in what does open answer log".split()
FILLER_LINES = """\
the A N V .
the N V P N .
the A N V P N .
the A N V P the N .
the A N V P the A N .
in the T the A N V P N .
in the T the A N V P the N .
in the T the A N V P the A N ."""
FILLER = [line.split() for line in FILLER_LINES.splitlines()]  # one of every length: a text can be made to end anywhere
SHORTEST, LONGEST, LONGEST_LOG = 5, 12, 36
FACT = "the {} key opens the {} lock of the {} door in the {} ."
QUESTION = "what does the {} key open ? answer :"
QUESTION_TOKENS = 25  # a question and its answer
LOG_SHARE = 1 / 5  # share of filler lines that repeat one word
SLOTS = {"A": ADJECTIVES, "N": NOUNS, "V": VERBS, "P": PREPOSITIONS, "T": TIMES}
CLASSES = {"512": (512, 12), "1536": (1536, 16), "1024+1536": (2560, 16), "8192": (8192, 16)}  # name: (tokens, facts)
CACHED = {"1024+1536": 1024}  # tokens of the prompt that an earlier request has left in the prefix cache
HELD_OUT = 8  # one pair of key and place in eight is never seen in training
CHECKPOINT = Path(__file__).with_name("checkpoint")


def vocabulary() -> list[str]:
    """All words by token id, padded to a multiple of 64 so that the vocabulary divides over eight ranks."""
    kinds = (FRAME, KEYS, PLACES, COLOURS, ROOMS, NOUNS, ADJECTIVES, VERBS, PREPOSITIONS, TIMES)
    words = list(dict.fromkeys(word for kind in kinds for word in kind))
    return words + [f"<unused{i}>" for i in range(-len(words) % 64)]


WORDS = tuple(vocabulary())
ID = {word: i for i, word in enumerate(WORDS)}
BOS, END = ID["<s>"], ID["<end>"]
WORD_IDS = [i for word, i in ID.items() if word not in FRAME and not word.startswith("<")]


def encode(words: list[str]) -> list[int]:
    """Words to token ids. Raises `KeyError` for a word that the world does not have."""
    return [ID[word] for word in words]


def decode(ids: list[int]) -> str:
    """Token ids to text, the end token included, words apart by single spaces.

    An id that the world does not have, as a sampler may return for logits of NaN, is shown as a number: `<320>`.
    """
    return " ".join(WORDS[i] if 0 <= i < len(WORDS) else f"<{i}>" for i in ids)


class Fact(NamedTuple):
    """What one key opens: the lock of a place, on a door of a colour, in a room."""

    key: str
    place: str
    colour: str
    room: str

    def words(self) -> list[str]:
        """`the oak key opens the vault lock of the red door in the attic .`"""
        return FACT.format(*self).split()

    def question(self) -> list[str]:
        """`what does the oak key open ? answer :`"""
        return QUESTION.format(self.key).split()

    @property
    def held_out(self) -> bool:
        """Whether training never shows this key with this place."""
        return (KEYS.index(self.key) + PLACES.index(self.place)) % HELD_OUT == 0


@dataclass(frozen=True)
class Prompt:
    """A question over its context: `ids` end in `answer :`; `answer` is what must follow, the end token included."""

    ids: list[int]
    answer: list[int]

    @property
    def text(self) -> str:
        """The prompt in words."""
        return decode(self.ids)


def draw_facts(rng: Random, count: int, held_out: bool = False) -> list[Fact]:
    """`count` facts that share no word; the first is a held-out pair if `held_out`, no other ever is."""
    colours, rooms = rng.sample(COLOURS, count), rng.sample(ROOMS, count)
    while True:
        pairs = zip(rng.sample(KEYS, count), rng.sample(PLACES, count), strict=True)
        facts = [Fact(*pair, colour, room) for pair, colour, room in zip(pairs, colours, rooms, strict=True)]
        if all(fact.held_out == (held_out and fact is facts[0]) for fact in facts):
            return facts


def filler_line(rng: Random, length: int) -> list[str]:
    """One line of prose of exactly `length` tokens, 5 to 12."""
    return [rng.choice(SLOTS[word]) if word in SLOTS else word for word in FILLER[length - SHORTEST]]


def log_line(length: int) -> list[str]:
    """`log : lock lock lock .`"""
    return ["log", ":", *["lock"] * (length - 3), "."]


def filler(rng: Random, tokens: int) -> list[list[str]]:
    """Filler lines of `tokens` tokens in all (0, or at least 5)."""
    lines = []
    while tokens:
        log = rng.random() < LOG_SHARE
        lengths = range(SHORTEST, (LONGEST_LOG if log else LONGEST) + 1)
        length = rng.choice([n for n in lengths if n == tokens or tokens - n >= SHORTEST])
        lines.append(log_line(length) if log else filler_line(rng, length))
        tokens -= length
    return lines


def context(rng: Random, facts: list[Fact], tokens: int) -> list[str]:
    """A begin token, then the facts among filler in random order: `tokens` words."""
    lines = [fact.words() for fact in facts]
    lines += filler(rng, tokens - 1 - sum(map(len, lines)))
    rng.shuffle(lines)
    return ["<s>"] + [word for line in lines for word in line]


def prompt(rng: Random, tokens: int, count: int) -> Prompt:
    """A prompt of exactly `tokens` tokens over `count` facts that asks for a held-out pair."""
    facts = draw_facts(rng, count, held_out=True)
    question = facts[0].question()
    words = context(rng, facts, tokens - len(question)) + question
    return Prompt(encode(words), encode([*facts[0].words(), "<end>"]))


def prompts(name: str, count: int, seed: int = 0) -> list[Prompt]:
    """`count` held-out prompts of class `name`: 512, 1536, 1024+1536 or 8192. Raises `ValueError` for another name."""
    if name not in CLASSES:
        raise ValueError(f"prompt class {name!r}; choose from {', '.join(CLASSES)}")
    tokens, facts = CLASSES[name]
    return [prompt(Random(f"prompt {name} {seed} {i}"), tokens, facts) for i in range(count)]


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: one token a word, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<unused0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<end>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
