"""A small GLM-DSA checkpoint that answers questions about its prompt, the corpus it learned from and the script that
trained it.
"""
