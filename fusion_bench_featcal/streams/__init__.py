"""Batches that pass through the models block by block, and sums over their positions."""
