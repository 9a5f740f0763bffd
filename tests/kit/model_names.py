"""Names of tasks and mergers that no door takes."""

UNUSABLE_NAMES = (
    "../../x", "/tmp/x", "..", ".", "x" * 300, "\u00e9" * 60, "\u4e2d" * 40,
    "a\\b", "a\nb", "a\x1b[31mb",
    "<script>", " a", "a.", "average", "Average", "normalised", "worst task", "model_info",
)  # fmt: skip
