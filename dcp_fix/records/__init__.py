"""Recorded runs: how a run becomes evidence that names its hardware, versions, commit and command.

Begin with records.py; machine.py asks the host, fingerprints.py names the code and the checkpoint.
Not here: the recorded runs themselves (notebooks/records), and how the pages read them (learn/recorded_runs.py).
"""
