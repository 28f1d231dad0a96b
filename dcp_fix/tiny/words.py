"""The words of the toy world and their token ids: one word is one token.

It does not: put words together (corpus.py, lessons.py).
"""

from __future__ import annotations

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


def vocabulary() -> list[str]:
    """All words by token id, padded to a multiple of 64 so that the vocabulary divides over eight ranks."""
    words = list(
        dict.fromkeys(FRAME + KEYS + PLACES + COLOURS + ROOMS + NOUNS + ADJECTIVES + VERBS + PREPOSITIONS + TIMES)
    )
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
