"""Mistakes in reports, comparisons and stored results."""

from mistakes.entry import Mutation

STATISTICS, JOINED, FILES = (
    f"results/test_{name}.py" for name in ("statistics", "joined", "files")
)
MUTATIONS = [
    Mutation(
        "recovered gap relative to the experts' accuracy",
        "results/run.py",
        "return (row.accuracy[AVERAGE] - merged) / (experts - merged)",
        "return (row.accuracy[AVERAGE] - merged) / experts",
        FILES,
    ),
    Mutation(
        "share of the gap relative to the experts' value",
        "results/summaries.py",
        'result["share"] = gains[AVERAGE] / gaps[AVERAGE]',
        'result["share"] = gains[AVERAGE] / experts[AVERAGE]  # type: ignore[index]',
        JOINED,
    ),
    Mutation(
        "worst task is the best one",
        "results/summaries.py",
        "worst = min(shares or tasks",
        "worst = max(shares or tasks",
        JOINED,
    ),
    Mutation(
        "tasks without a gap may be the worst",
        "results/summaries.py",
        "LEAST_GAP = 0.01\n",
        "LEAST_GAP = 0.0001\n",
        JOINED,
    ),
    Mutation(
        "higher losses recover the gap",
        "results/summaries.py",
        "sign=-1 if any(word in metric for word in _LOWER) else 1",
        "sign=1",
        JOINED,
    ),
    Mutation(
        "rows are compared with the merger at another setting",
        "results/joining.py",
        "return all(two.get(key, value) == value for key, value in one.items())",
        "return bool(one) or bool(two) or True",
        JOINED,
    ),
    Mutation(
        "the oldest of equal rows counts",
        "results/joining.py",
        "            rows[key] = row\n",
        "            rows[key] = before or row\n",
        JOINED,
    ),
    Mutation(
        "tasks weigh by their items in intervals",
        "results/statistics.py",
        "sum(item.var(ddof=1) / item.size for item in items)",
        "sum(item.var(ddof=1) for item in items) / max(item.size for item in items)",
        STATISTICS,
    ),
    Mutation(
        "variance over items that are not paired",
        "results/statistics.py",
        "gains.append(next(sides) - next(sides))",
        "gains.append(next(sides) - next(sides)[:, ::-1])",
        STATISTICS,
    ),
    Mutation(
        "intervals over seeds are those of the normal distribution",
        "results/statistics.py",
        "stats.t.ppf((1 + LEVEL) / 2, count - 1)",
        "stats.norm.ppf((1 + LEVEL) / 2)",
        STATISTICS,
    ),
    Mutation(
        "intervals of gains leave out the seeds",
        "results/statistics.py",
        "half = math.hypot(half, half_seeds)",
        "half = half",
        STATISTICS,
    ),
    Mutation(
        "two seeds have an interval",
        "results/statistics.py",
        "if count == 2 or (",
        "if (",
        STATISTICS,
    ),
    Mutation(
        "one-sided p-values of differences",
        "results/statistics.py",
        "(half / NORMAL) / math.sqrt(2))",
        "(half / NORMAL) / math.sqrt(2)) / 2",
        STATISTICS,
    ),
    Mutation(
        "no sign test where few items tell rows apart",
        "results/statistics.py",
        "max(p, p_seeds, p_sign)",
        "max(p, p_seeds)",
        STATISTICS,
    ),
    Mutation(
        "Holm's correction does not step down",
        "results/statistics.py",
        "(len(values) - rank) * values[index]",
        "len(values) * values[index]",
        STATISTICS,
    ),
    Mutation(
        "corrected p-values may fall again",
        "results/statistics.py",
        "largest = max(largest, min(1.0, (len(values) - rank) * values[index]))",
        "largest = min(1.0, (len(values) - rank) * values[index])",
        STATISTICS,
    ),
    Mutation(
        "lines.csv rounds to whole per cent",
        "results/lines.py",
        "        writer.writerow(line)\n",
        "        writer.writerow(line | {VALUE: round(line[VALUE], 2)})\n",
        FILES,
    ),
    Mutation(
        "names of users are markup on pages",
        "results/page.py",
        "autoescape=True",
        "autoescape=False",
        "results/test_page.py",
    ),
    Mutation(
        "bars of accuracy are twice the gain's interval",
        "results/figures.py",
        'return 0.0 if is_missing(row["half"]) else unit * row["half"]',
        'return 0.0 if is_missing(row["half"]) else 2 * unit * row["half"]',
        "results/test_figures.py",
    ),
]
