"""Who takes part in a run, how its ranks exchange tensors, and what happens when one of them does not.

Begin with group.py: the collectives, and ranks as threads of one process; torch_group.py has them as processes,
launch.py starts those, watch.py notices who died. Not here: what is exchanged, and why.
"""
