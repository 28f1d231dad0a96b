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


def shown(value: object, most: int = LONGEST) -> str:
    """Text of somebody else for a terminal: what does not print is escaped, what is long is cut.

    Not for markup: rich must be told `markup=False`.

    >>> shown("a\\x1b[31mred\\nb"), shown("é" + chr(0xDC80)), shown("x" * 9, most=4)
    ('a\\\\x1b[31mred\\\\nb', 'é\\\\udc80', 'xxxx... (9 characters)')
    """
    text = str(value)
    rest = f"... ({len(text)} characters)" if len(text) > most else ""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most]) + rest


def shown_lines(value: object) -> str:
    """A message of one or more lines, each of them as `shown` has it, none cut."""
    return "\n".join(shown(line, len(line)) for line in str(value).split("\n"))
