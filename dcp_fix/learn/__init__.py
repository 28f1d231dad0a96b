"""What the notebooks share: figures and the exercises' checks."""
