"""Batches on their way through the models, and the rows of them that are summed."""
