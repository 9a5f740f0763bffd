"""Models of sentence-transformers: the library opens them, and reads and scores texts.

Needs the extra `encoders`.
"""
