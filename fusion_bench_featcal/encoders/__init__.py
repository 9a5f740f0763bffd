"""Models of sentence-transformers. The library opens them and reads their texts.

Needs the extra `encoders`.
"""
