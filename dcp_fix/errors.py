"""What the command line shows as one line instead of a traceback."""


class UserError(ValueError):
    """The input is at fault, not the program: the message prints the offending value and names the remedy."""
