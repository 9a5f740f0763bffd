"""Datasets as model inputs: labels, pictures and their tensors, texts and their tokens."""
