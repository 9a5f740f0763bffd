"""Mistakes in reports, comparisons and what they keep."""

from mistakes.entry import Mutation

MUTATIONS = [
    Mutation(
        "recovered gap relative to the experts' accuracy",
        "compare/names.py",
        "return (value - merged) / gap if gap > 0 else None",
        "return (value - merged) / expert if gap > 0 else None",
        "compare/test_report.py",
    ),
    Mutation(
        "worst task is the best one",
        "compare/names.py",
        "worst = min(shares, key=shares.__getitem__)",
        "worst = max(shares, key=shares.__getitem__)",
        "compare/test_tables.py",
    ),
    Mutation(
        "tasks without a gap may be the worst",
        "compare/names.py",
        "LEAST_GAP = 0.01\n",
        "LEAST_GAP = 0.0001\n",
        "compare/test_tables.py compare/test_combine.py",
    ),
    Mutation(
        "tasks weigh by their items in intervals",
        "compare/bootstrap.py",
        "        observed = observed + counts @ values / items\n"
        "        resampled = resampled + drawn @ values / items\n",
        "        total = sum(map(len, columns.values())) / len(columns)\n"
        "        observed = observed + counts @ values / total\n"
        "        resampled = resampled + drawn @ values / total\n",
        "compare/test_bootstrap.py",
    ),
    Mutation(
        "all tasks resampled with one stream of random numbers",
        "compare/bootstrap.py",
        "np.random.default_rng([seed, _number(task)])",
        "np.random.default_rng(seed)",
        "compare/test_bootstrap.py",
    ),
    Mutation(
        "intervals of 95 % leave out 5 % on each side",
        "compare/bootstrap.py",
        "[(1 - level) / 2, (1 + level) / 2]",
        "[1 - level, level]",
        "compare/test_bootstrap.py",
    ),
    Mutation(
        "interval of the share of a gap that may not exist",
        "compare/bootstrap.py",
        "if estimate[1] <= 0 or resampled[:, 1].min() <= 0:",
        "if estimate[1] <= 0:",
        "compare/test_bootstrap.py",
    ),
    Mutation(
        "standard deviation divides by n",
        "compare/combine.py",
        "np.std(value, ddof=1)",
        "np.std(value)",
        "compare/test_combine.py",
    ),
    Mutation(
        "report.csv rounds to whole per cent",
        "compare/report.py",
        'f"{accuracy:.6f}", gap, loss])',
        'f"{accuracy:.2f}", gap, loss])',
        "compare/test_report.py",
    ),
    Mutation(
        "digest of report.json not checked",
        "compare/files.py",
        "elif seal != _digest(content):",
        "elif not seal:",
        "compare/test_report_damage.py",
    ),
    Mutation(
        "lowest accuracy of a column in bold",
        "compare/tables.py",
        "top = max(candidates.values(), default=None)",
        "top = min(candidates.values(), default=None)",
        "compare/test_tables.py",
    ),
    Mutation(
        "kept models' digests not checked",
        "comparison/store.py",
        "if _digests(state) != expected:",
        "if not expected:",
        "comparison/test_store.py",
    ),
    Mutation(
        "files of items count by their names alone",
        "comparison/digests.py",
        "            digest.update(path.read_bytes())\n",
        "            pass\n",
        "comparison/test_fingerprint.py",
    ),
    Mutation(
        "digest of items.npz not checked",
        "compare/items.py",
        r"""elif _sealed(content[: -length - 2] + b"\0\0") != content:""",
        "elif not content:",
        "compare/test_report_damage.py compare/test_items.py",
    ),
    Mutation(
        "paper's number beside rows of fewer samples",
        "compare/published.py",
        "if wanted is None or numbers != {SAMPLES}:",
        "if wanted is None:",
        "compare/test_published.py",
    ),
    Mutation(
        "draws of any seed have one fingerprint",
        "comparison/data.py",
        '"test_tta" else split, number, seed)',
        '"test_tta" else split, number)',
        "comparison/test_fingerprint.py",
    ),
]
