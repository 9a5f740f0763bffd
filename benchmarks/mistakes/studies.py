"""Mistakes in studies, diagnoses and corrupted data."""

from mistakes.entry import Mutation

MUTATIONS = (
    Mutation(
        "local mismatch is the whole drift",
        "lab/diagnosis/measure.py",
        "propagation = crossed - expert, features - crossed",
        "propagation = features - expert, features - crossed",
        "diagnosis/test_measure.py",
    ),
    Mutation(
        "PCA is not of centred features",
        "lab/diagnosis/lines.py",
        "svd(features - center,",
        "svd(features,",
        "diagnosis/test_measure.py",
    ),
    Mutation(
        "a severity has the noise of the one before",
        "data/corruptions.py",
        "scale=_NOISE[severity - 1]",
        "scale=_NOISE[severity - 2]",
        "data/test_corruptions.py",
    ),
    Mutation(
        "motion blur changes the brightness",
        "data/corruptions.py",
        "return kernel / kernel.sum()",
        "return kernel / kernel.max()",
        "data/test_corruptions.py",
    ),
    Mutation(
        "all images have the same noise",
        "data/corruptions.py",
        'f"{seed}:{task}:{position}"',
        'f"{seed}:{task}"',
        "data/test_corruptions.py",
    ),
    Mutation(
        "a finished cell is run again",
        "lab/compare/cells.py",
        "if path.exists():",
        "if not path:",
        "comparison/test_reruns.py",
    ),
    Mutation(
        "a cell's name says nothing of its seed",
        "lab/compare/cells.py",
        "made_of += [self.seed, plain",
        "made_of += [plain",
        "comparison/test_reruns.py",
    ),
    Mutation(
        "calibration images are not corrupted",
        "fusionbench/data.py",
        'rows = corrupted(rows, change["kind"], change["severity"], settings.seed, task)',
        "pass",
        "test_calibration_data.py",
    ),
)
