"""The handling of signals that a command started by a test has, however the tests themselves were started.

A shell starts the background jobs of a script with SIGINT ignored, and nohup starts with SIGHUP ignored; children
inherit that. A test that sends such a signal starts its command with `preexec_fn=heed_signals`.
"""

import signal


def heed_signals(ignored=()) -> None:
    """In a child, before its program begins: SIGINT, SIGTERM and SIGHUP as from a terminal, except those to ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
