"""Which of the defects a vLLM has: parts of its own code are run on small inputs, on a CPU, in seconds.

It is no sandbox (a probe executes the target's code), and it does not repair or start a vLLM.
Begin with report.py, the command; then runner.py and session.py, and probes/, one file per part of vLLM that is asked.
README.md beside this file has the usage, what each column of the matrix means, and what to do about it.
"""
