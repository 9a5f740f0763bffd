"""The names that need the extra `encoders`. Their import takes seconds."""

from fusion_bench_featcal.errors.words import install_advice

try:
    import sentence_transformers as st
    from sentence_transformers.base.model import BaseModel as Encoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sklearn.metrics import average_precision_score

    KINDS = (st.SentenceTransformer, st.CrossEncoder, st.SparseEncoder, st.MultiVectorEncoder)
except (ImportError, AttributeError) as error:
    advice = install_advice("'.[encoders]'")
    raise ImportError(f"needs sentence-transformers 6.2 or newer: {advice}") from error

__all__ = ["KINDS", "Encoder", "MultiVectorMask", "Router", "Transformer",
           "average_precision_score", "st"]  # fmt: skip
