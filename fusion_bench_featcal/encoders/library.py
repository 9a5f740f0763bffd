"""The classes of sentence-transformers, whose import takes seconds."""

try:
    import sentence_transformers as st
    from sentence_transformers.base.modules import Router, Transformer

    KINDS = (st.SentenceTransformer, st.CrossEncoder, st.SparseEncoder, st.MultiVectorEncoder)
except (ImportError, AttributeError) as error:
    raise ImportError(
        "needs sentence-transformers 6.2 or newer: pip install 'fusion_bench_featcal[encoders]'"
    ) from error

__all__ = ["KINDS", "Router", "Transformer", "st"]
