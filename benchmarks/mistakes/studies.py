"""Mistakes in studies, diagnoses and corrupted data."""

from mistakes.entry import Mutation

MUTATIONS = (
    Mutation(
        "local mismatch is the whole drift",
        "lab/diagnosis/drift.py",
        "propagation = crossed - expert, features - crossed",
        "propagation = features - expert, features - crossed",
        "diagnosis/test_measure.py",
    ),
    Mutation(
        "PCA is not of centred features",
        "lab/diagnosis/drift.py",
        "svdvals(features - features.mean(0))",
        "svdvals(features)",
        "diagnosis/test_measure.py",
    ),
    Mutation(
        "a severity has the noise of the one before",
        "data/corruptions.py",
        "scale=_NOISE[severity - 1]",
        "scale=_NOISE[severity - 2]",
        "data/test_derived_images.py",
    ),
    Mutation(
        "motion blur changes the brightness",
        "data/corruptions.py",
        "return kernel / kernel.sum()",
        "return kernel / kernel.max()",
        "data/test_derived_images.py",
    ),
    Mutation(
        "all images have the same noise",
        "data/corruptions.py",
        'f"{seed}:{task}:{position}"',
        'f"{seed}:{task}"',
        "data/test_derived_images.py",
    ),
    Mutation(
        "equal weights leave lambda as it is",
        "lab/ablations.py",
        "sums.mul_(scale.to",
        "sums.mul_(torch.ones_like(scale).to",
        "test_plus_properties.py",
    ),
    Mutation(
        "a subset of tasks is evaluated on all",
        "lab/compare/axes.py",
        "for pool in POOLS:",
        'for pool in ("modelpool",):',
        "studies/test_points.py",
    ),
    Mutation(
        "points of a study share a folder",
        "lab/compare/points.py",
        'return f"{name[:_LONGEST]}-{digest}"',
        "return name[:_LONGEST]",
        "studies/test_points.py",
    ),
    Mutation(
        "axes are varied around other settings than the first label's",
        "lab/compare/axes.py",
        "return Axis(name, options, options[0])",
        "return Axis(name, options, Option(options[0].labels, {}))",
        "studies/test_points.py",
    ),
    Mutation(
        "a claim of a dead process is held for ever",
        "lab/compare/claims.py",
        "        except psutil.Error:\n            return False",
        "        except psutil.Error:\n            return True",
        "comparison/test_claims.py",
    ),
    Mutation(
        "a cell that kills its process is run without end",
        "lab/compare/claims.py",
        "if tries > _TRIES:",
        "if tries > 100 * _TRIES:",
        "comparison/test_claims.py",
    ),
    Mutation(
        "a cell is run although another process finished it",
        "lab/compare/cells.py",
        "if result is not None:\n                    log",
        "if False:\n                    log",
        "comparison/test_reruns.py",
    ),
)
