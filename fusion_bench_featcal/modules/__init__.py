"""Modules of a block, those that share an input, and what they receive."""
