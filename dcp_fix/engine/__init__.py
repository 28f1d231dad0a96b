"""The model that answers: a GLM-DSA checkpoint, its shards, cache and steps, greedy and paged.

Begin with model.py, the forward pass, which knows nothing of ranks; sharded.py is one rank's attention over its shard,
engine.py the generation loop. Not here: the operators (norm_rope/, attention/, combine/), training (tiny/).
"""
