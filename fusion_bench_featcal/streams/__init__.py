"""Batches that pass through the models block by block, and the rows of them that are summed."""
