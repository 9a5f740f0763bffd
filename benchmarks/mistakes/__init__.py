"""The mistakes of `benchmarks/mutations.py`, a table for each part of the package.

When code moves, an entry moves with it: update its file, and its old and new text if the line has
changed. `mutations.py --list` names the entries that no longer apply.
"""
