"""The model that answers: a GLM-DSA checkpoint, its shards, cache and steps, greedy and paged."""
