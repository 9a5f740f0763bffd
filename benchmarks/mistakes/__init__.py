"""The mistakes of `benchmarks/mutations.py`, a table for each part of the package.

When code moves, an entry moves with it: change its file, and its old and new text where the line
reads otherwise. `mutations.py --list` names the entries that no longer apply.
"""
