"""Mistakes in reports, comparisons and what they keep."""

from mistakes.entry import Mutation

MUTATIONS = [
    Mutation(
        "recovered gap relative to the experts' accuracy",
        "results/long_table.py",
        "return (value - merged) / gap if gap > 0 else None",
        "return (value - merged) / expert if gap > 0 else None",
        "results/test_report.py",
    ),
    Mutation(
        "worst task is the best one",
        "results/long_table.py",
        "worst = min(shares, key=shares.__getitem__)",
        "worst = max(shares, key=shares.__getitem__)",
        "results/test_run_page.py",
    ),
    Mutation(
        "tasks without a gap may be the worst",
        "results/long_table.py",
        "LEAST_GAP = 0.01\n",
        "LEAST_GAP = 0.0001\n",
        "results/test_run_page.py results/test_summary.py",
    ),
    Mutation(
        "tasks weigh by their items in intervals",
        "results/items.py",
        "        observed = observed + counts @ values / items\n"
        "        resampled = resampled + np.concatenate(parts) / items\n",
        "        total = sum(map(len, columns.values())) / len(columns)\n"
        "        observed = observed + counts @ values / total\n"
        "        resampled = resampled + np.concatenate(parts) / total\n",
        "results/test_items.py",
    ),
    Mutation(
        "Holm's correction does not step down",
        "results/differences.py",
        "(len(values) - rank) * values[index]",
        "len(values) * values[index]",
        "results/test_differences.py",
    ),
    Mutation(
        "corrected p-values may fall again",
        "results/differences.py",
        "largest = max(largest, min(1.0, (len(values) - rank) * values[index]))",
        "largest = min(1.0, (len(values) - rank) * values[index])",
        "results/test_differences.py",
    ),
    Mutation(
        "one-sided p-values of differences",
        "results/items.py",
        "p = math.erfc(abs(value) / error / math.sqrt(2))",
        "p = math.erfc(abs(value) / error / math.sqrt(2)) / 2",
        "results/test_differences.py",
    ),
    Mutation(
        "all tasks resampled with one stream of random numbers",
        "results/items.py",
        "np.random.default_rng([BOOTSTRAP_SEED, _number(task)])",
        "np.random.default_rng(BOOTSTRAP_SEED)",
        "results/test_items.py",
    ),
    Mutation(
        "intervals of 95 % leave out 5 % on each side",
        "results/items.py",
        "[(1 - LEVEL) / 2, (1 + LEVEL) / 2]",
        "[1 - LEVEL, LEVEL]",
        "results/test_items.py",
    ),
    Mutation(
        "interval of the share of a gap that may not exist",
        "results/items.py",
        "if estimate[1] <= 0 or resampled[:, 1].min() <= 0:",
        "if estimate[1] <= 0:",
        "results/test_items.py",
    ),
    Mutation(
        "intervals of gains leave out the seeds",
        "results/items.py",
        "estimate - math.hypot(low, half), estimate + math.hypot(high, half)",
        "estimate - low, estimate + high",
        "results/test_items.py",
    ),
    Mutation(
        "standard deviation divides by n",
        "results/summary.py",
        "np.std(numbers, ddof=1)",
        "np.std(numbers)",
        "results/test_summary.py",
    ),
    Mutation(
        "report.csv rounds to whole per cent",
        "results/report.py",
        '[entry.metric] = f"{entry.value:.6f}"',
        '[entry.metric] = f"{entry.value:.2f}"',
        "results/test_report.py",
    ),
    Mutation(
        "lowest accuracy of a column in bold",
        "results/tables.py",
        "top = max(candidates.values(), default=None)",
        "top = min(candidates.values(), default=None)",
        "results/test_run_page.py",
    ),
    Mutation(
        "kept models' digests not checked",
        "tensor_files.py",
        "if digest_file(path) != digest:",
        "if not digest:",
        "comparison/test_store.py",
    ),
    Mutation(
        "files of items count by their names alone",
        "comparison/data.py",
        "            digest.update(path.read_bytes())\n",
        "            pass\n",
        "comparison/test_fingerprint.py",
    ),
    Mutation(
        "digest of items.npz not checked",
        "results/items.py",
        r"""if has_seal and _sealed(content[: -length - 2] + b"\0\0") != content:""",
        "if not content:",
        "results/test_report_damage.py results/test_items.py",
    ),
    Mutation(
        "draws of any seed have one fingerprint",
        "comparison/data.py",
        '"test_tta" else split, number, seed)',
        '"test_tta" else split, number)',
        "comparison/test_fingerprint.py",
    ),
]
