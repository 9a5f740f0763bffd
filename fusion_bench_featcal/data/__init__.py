"""Data sets as models take them: labels, pictures and their tensors, texts and their tokens.

Calibration and evaluation read, label, decode and tokenise with the same code.
"""
