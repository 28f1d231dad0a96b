"""What the notebooks share: figures, the checks of the exercises, the detective cases, recorded runs as tables.

Begin with plots.py and exercises.py. Nothing else in the package imports this room.
Not here: anything that a command needs.
"""
