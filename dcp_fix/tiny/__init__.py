"""A small GLM-DSA checkpoint that answers questions about its prompt, its corpus and the script that trained it.

Begin with corpus.py, a small world of keys, locks and doors; train.py is the loop, curriculum.py what is learned when.
The weights are in checkpoint/. Not here: the forward pass (engine/).
"""
