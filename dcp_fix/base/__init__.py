"""Plumbing that knows nothing of attention: errors, bounded reads, schemas, processes, output files, equality.

Begin with errors.py (exit statuses) and equality.py (what "identical" and "close" mean).
Not here: anything that one room alone needs; that stays in the room.
"""
