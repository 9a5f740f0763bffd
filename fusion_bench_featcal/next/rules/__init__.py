"""Rules: how the blocks of a model are calibrated."""
