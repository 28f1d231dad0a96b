"""Sparse MLA under decode context parallelism: the right way, the four ways it was wrong, and the proof of repair.

Importing this package loads nothing heavy; torch comes with the submodule that needs it.
"""

__version__ = "0.2.0"
