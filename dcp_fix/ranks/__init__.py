"""Who takes part in a run, how its ranks exchange tensors, and what happens when one of them does not."""
