"""What the command line shows as one line instead of a traceback, the exit statuses, and text that a terminal may see.

0    the same, no defect, or done           1     different, or a defect: a result, not a failure
2    the input or the surroundings          70    a fault of this program
128 + n    ended by signal n: 130 after Ctrl-C, 143 after SIGTERM
"""

DIFFERS = 1
USER_ERROR = 2
FAULT = 70
LONGEST = 200  # characters of somebody else's text that a message shows


class UserError(ValueError):
    """The input is at fault, not the program: the message prints the offending value and names the remedy.

    Several lines are several errors.
    """


def escaped(text: str) -> str:
    """`text` with everything written out that a terminal would obey or no encoding has: controls, lone surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(value: object, most: int = LONGEST) -> str:
    """Text of somebody else for a terminal: `escaped`, and at most `most` characters of that.

    Not for markup: rich must be told `markup=False`.

    >>> shown("a\\x1b[31mred\\nb"), shown("é" + chr(0xDC80)), shown("x" * 9, most=8), shown("\\x1b" * 9, most=8)
    ('a\\\\x1b[31mred\\\\nb', 'é\\\\udc80', 'xxxxx...', '\\\\x1b\\\\...')
    """
    safe = escaped(str(value)[: most + 1])
    return safe if len(safe) <= most else safe[: most - 3] + "..."


def shown_lines(value: object) -> str:
    """A message of one or more lines, each of them `escaped`, none cut."""
    return "\n".join(map(escaped, str(value).split("\n")))
