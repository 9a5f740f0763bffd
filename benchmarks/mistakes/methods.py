"""Mistakes in the other post-merging methods and mergers."""

from mistakes.entry import Mutation

MUTATIONS = [
    Mutation(
        "Surgery adds its drift",
        "methods/corrected_model.py",
        "return features - functional.linear(hidden, self.up)",
        "return features + functional.linear(hidden, self.up)",
        "methods/test_trained_corrections.py",
    ),
    Mutation(
        "Surgery trained on squared errors",
        "methods/surgery.py",
        "return functional.l1_loss(module(before), target)",
        "return functional.mse_loss(module(before), target)",
        "methods/test_surgery_agreement.py methods/test_trained_corrections.py",
    ),
    Mutation(
        "Surgery's bottleneck is linear",
        "methods/corrected_model.py",
        "hidden = torch.relu(functional.linear(features, self.down))",
        "hidden = functional.linear(features, self.down)",
        "methods/test_trained_corrections.py",
    ),
    Mutation(
        "ProbSurgery's divergence has a wrong sign",
        "methods/prob_surgery.py",
        "mean.square() - 1 - log_variance)",
        "mean.square() - 1 + log_variance)",
        "methods/test_trained_corrections.py",
    ),
    Mutation(
        "RegMean's off_diagonal ignored",
        "methods/blockwise.py",
        "gram = shrink_off_diagonal(mean_gram, self._method.off_diagonal)",
        "gram = mean_gram.clone()",
        "methods/test_mergers.py",
    ),
    Mutation(
        "RegMean++ on the experts' own features",
        "methods/blockwise.py",
        'stream="merged", anchor="mean"',
        'stream="expert", anchor="mean"',
        "methods/test_mergers.py",
    ),
    Mutation(
        "LOT cuts directions of little energy",
        "methods/least_squares.py",
        "seen = energies > len(gram) * torch.finfo(precision).eps * energies.max()",
        "seen = energies > 0.01 * energies.max()",
        "methods/test_least_squares.py",
    ),
    Mutation(
        "LOT leaves unseen directions at the mean",
        "methods/blockwise.py",
        'anchor="base", off_diagonal=1.0, weighs',
        'anchor="mean", off_diagonal=1.0, weighs',
        "methods/test_mergers.py",
    ),
    Mutation(
        "ridge surgery's lambda not relative to the features",
        "methods/ridge_surgery.py",
        "return power / (power + ridge_lambda * self.scale)",
        "return power / (power + ridge_lambda)",
        "methods/test_ridge_surgery.py",
    ),
    Mutation(
        "ridge surgery chooses lambda on the samples it fits",
        "methods/ridge_surgery.py",
        "(residual / (1 - leverage)[:, None])",
        "residual",
        "methods/test_ridge_surgery.py",
    ),
    Mutation(
        "Surgery's batches are not shuffled",
        "methods/training.py",
        "torch.randperm(samples, generator=generator).split(batch_size)",
        "torch.arange(samples).split(batch_size)",
        "methods/test_trained_corrections.py",
    ),
    Mutation(
        "SurgeryV2 compares first tokens, not means",
        "methods/corrected_clip.py",
        "means.append(corrected.flatten(1, -2).mean(1)",
        "means.append(corrected.flatten(1, -2)[:, 0]",
        "methods/test_surgery_v2.py",
    ),
    Mutation(
        "Surgery sees the labels of test texts",
        "methods/feature_correction.py",
        'calibration_targets="generated" if answers else self.calibration_targets',
        "calibration_targets=self.calibration_targets",
        "methods/test_text_post_merging.py",
    ),
    Mutation(
        "average on the way divides by one model too many",
        "fusionbench/fusing.py",
        "return state_dict_div(total, len(experts))",
        "return state_dict_div(total, len(experts) + 1)",
        "reads/test_fused_merge.py",
    ),
]
