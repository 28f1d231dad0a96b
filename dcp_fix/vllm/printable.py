"""Text of others, for a terminal: everything that it would obey is written out."""


def printable(text: str, longest: int = 200) -> str:
    """At most `longest` characters of `text`, with control characters and lone surrogates as escapes."""
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: longest + 1])
    return safe if len(safe) <= longest else safe[: longest - 3] + "..."
