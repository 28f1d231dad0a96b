"""What was shown: the ladder, the comparison of DCP sizes, what they cost, and the records that prove a run."""
