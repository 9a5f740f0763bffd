"""Every knob of FeatCal, once: its default, its range and what it does."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.setting_checks import CHECKS, problems_of

SETTINGS_OF_THE_RUN = (
    "activations",
    "activations_dir",
    "cache_dir",
    "checkpoint_dir",
    "decode_workers",
    "ignore_config",
    "pixel_cache_mb",
    "resume",
    "stream_experts",
)
"""What is kept where and how it is read: settings without a part in the calibrated model."""


PLUS: Mapping[str, Any] = {
    "order": "module",
    "target": "residual",
    "ridge": "kfold",
    "stages": 2,
    "task_weights": "drift",
    "row_weights": "auto",
    "augment": "auto",
    "held_out": "auto",
    "trials": "auto",
    "decoder_rows": "auto",
    "calibrate_norm": False,
}
"""FeatCal+, as `config/featcal_settings/plus.yaml` has it for the command line."""


class CalibrationError(RuntimeError):
    """A calibration that cannot go on: the message names the place, the cause and the setting."""


@dataclass(frozen=True, kw_only=True)
class FeatCalSettings:
    """Settings of one calibration. The defaults are the paper's for CLIP (arXiv 2605.13030, 5.1).

    The same names are used in YAML (`method.<name>`), in Python and in error messages.

    Attributes:
        ridge_lambda: Strength of the pull towards the anchor (paper: lambda, Eq. 15), 0 to 1e12.
            It is relative: every task's gram enters with Frobenius norm 1.
        mix_alpha: Share of the expert's features in the target input (alpha, Eq. 10), 0 to 1.
        anchor_rho: Anchor extrapolation (rho, Eq. 11): 0 is the base, 1 the merged model; -1000
            to 1000. With `stages` 2, 2 is as far beyond the experts' steps as the merged model
            falls short of them.
        eps: Stabiliser added to the system's diagonal and floor of the task weight's norm
            (Eqs. 14, 17), 0 to 1e12.
        order: Solve all modules of a `block` from one look at it (Algorithm 1), or each `module`
            (those that share an input together) once the ones before it have changed. `model`
            solves every block from the merged model's features, none of which has changed: an
            ablation of the forward order, for the paper's target and ridge.
        target: Towards the expert's output of each `module` (Eq. 10), or, for modules that write to
            the hidden features, towards the expert's hidden features (`residual`): they then make
            up for what earlier modules have left.
        ridge: A `fixed` `ridge_lambda` with `mix_alpha`, or `kfold`: strengths are chosen for each
            module by 4-fold held-out error, and these two have no part. Unless all of order, target
            and ridge are the paper's, a fixed lambda is relative to the norm of the summed Gram
            matrix, divided by the number of tasks.
        stages: With `ridge` `kfold`: 1: solve towards the target alone; 2: first towards what the
            experts' weights give on the calibrated features, then from there towards the target.
        first_ridge_scale: With `stages` 2: factor of the first stage's lambdas that held-out error
            has chosen, above 0 and at most 1000.
        task_weights: Factors of the tasks' weights by task (null: 1 each; tasks that are not named
            have 1), or `drift`: where a calibration leaves a task far behind, a second one of
            `trials` gives it more weight. Neither is for the paper's order, target and ridge, for
            which there is `equal`: an ablation in which Gram matrices enter as they are, and
            lambda is relative to the mean of their norms.
        row_weights: `uniform`, or `sensitivity`: a row weighs as the expert's final features depend
            on it, by the gradient of a random probe of them at the positions that `decoder_rows`
            names (with `auto` and no labels the last one); all other rows count, too. `auto`:
            sensitivity for language models. Not for the paper's order, target and ridge.
        augment: Changed copies of calibration samples that are used besides them: null: none;
            `auto`: of images jittered ones (turned by up to 8 degrees, scaled and shifted by up
            to 8 %), of other inputs none; `jitter`: the same, but images are a must; or a mapping
            with the `_target_` of a callable that takes a batch of one sample and a
            torch.Generator, its arguments, and the number of `copies` of a sample. Without it
            there are as many as bring the samples that a task has to 256, from 1 to 7. A copy
            depends on seed, task and the sample's number alone.
        held_out: Samples of each task that take no part in the solves, and on which the calibrated
            model is compared with the merged one: how many, >= 0, or `auto`: one of eight, at most
            32, and none where a task has fewer than 16. They are the last ones.
        trials: Most calibrations that one run may take, >= 1, each of the same merged model with
            one setting changed; the one with the highest cosine of final features to the experts'
            on held-out samples is kept. `auto`: 1, and up to 2 more with larger first lambdas for
            language models, and up to 2 more where `task_weights` is `drift`. docs/plus.md has
            what is tried.
        strict: Whether a run fails where, on held-out samples, final features of a task are not
            closer to its expert's than the merged model's are. Without it that is a warning.
        samples_per_task: Calibration samples drawn for each task, >= 1; fewer: all of them.
        batch_size: Samples that run through a block together, >= 1; with `augment` each with its
            copies, where this is a multiple of 4. Changes memory and rounding.
        seed: Seeds each task's own draw of samples, together with the task's name, >= 0.
        calibrate_bias: Whether biases are calibrated (Eqs. 51-55).
        calibrate_norm: Whether gains and shifts of LayerNorm, GroupNorm and BatchNorm are
            calibrated (Eqs. 56-59).
        batch_norm: Running statistics of BatchNorm: `reestimate` them on the calibration samples,
            all tasks weighing the same, once the modules before have changed; or keep those of
            the `merged` model.
        modules: Patterns of the modules to calibrate (None: every linear module,
            convolution and norm of the blocks). A pattern matches a module's full name or any end
            of it (`fc1`, `self_attn.*`), with `*` for anything; a leading `!` excludes.
        token_weights: `uniform`, or `demo_last_block`: in the last block every token but the first
            weighs 0.01, except for modules named k_proj and v_proj (the authors' demo, not the
            paper).
        decoder_rows: Which positions of a decoder count: `all` that are no padding, only the
            `targets`, whose output predicts a target token, or `auto`: targets where there are
            labels. Only models with a decoder heed it. The decoder of an encoder-decoder model fed
            by `labels` has no others.
        calibration_split: The data split samples are drawn from: `train`, `val` or `test`.
        calibration_data: Data sets by task, which take the place of the pool's own in
            `calibration_split`: a path, a hub id, or a data set's config with `_target_`. None: the
            pool's own only.
        calibration_targets: Text models only: what follows the prompt: the data's `labels`, or what
            the task's expert itself writes by greedy search (`generated`): then no label is used.
        generated_tokens: Longest target that an expert may generate, >= 1.
        max_length: Longest text in tokens, >= 2: longer ones are cut. None: the tokenizer's own
            limit, beyond which a text is an error.
        family: How the model is cut into blocks: `auto`, a family's name, a mapping with `name` and
            that family's options (`{name: replay, blocks: [encoder.*]}`), one with the class of a
            family of one's own (`{_target_: my_module.MyFamily, option: 1}`), or a Family object.
        ignore_config: Keys in which experts' configs may differ from the merged model's although
            they change what a model computes (`hidden_act`): experts then run as the merged model
            does.
        stream_experts: `auto` reads experts block by block where they are safetensors files and
            loads them whole elsewhere; True insists on files; False loads them whole.
        expert_read_budget: Most bytes of expert weights to read: a number, or a text with a unit
            (`800MB`, `1.5 GiB`) or a share of a full read (`50%`). Where it falls short, the merged
            model's weights stand in for the expert's. None: no limit.
        log_drift: Whether each block's drift is measured before and after (costs the expert's
            forward pass when `mix_alpha` is 0).
        linear_kernel: Library that multiplies float32 matrices on the CPU, in calibration and
            evaluation: `torch` (its default, MKL), `onednn`, or `auto`: oneDNN on AMD processors
            with AVX-512. The two round differently; a resumed run keeps its choice.
        sums_precision: Precision of the products that accumulate the Gram and cross matrices.
            `auto`: float64 for a `ridge_lambda` below 0.01, which float32 rounding would reach the
            update through, else float32. `float32`, `float64`; `tf32`, faster on a GPU and the same
            as float32 elsewhere; `bfloat16`: rounded features, faster still on a GPU. TF32 and
            bfloat16 products are added up in float32.
        activations: Where samples' features wait between blocks: on the `device`, in `host` memory
            (pinned beside a GPU), in files on `disk` that are mapped when they are read, or `auto`:
            the first of these with room. Changes memory and rounding.
        activations_dir: Folder for these files, in which every run has one of its own that is
            removed at its end; None: where the system keeps temporary files.
        checkpoint_dir: Folder that keeps every finished block, so that an interrupted run can go
            on; None: nothing is kept.
        resume: Whether to go on from the blocks that `checkpoint_dir` keeps. Without any the run
            starts from the beginning.
        decode_workers: Threads that decode and process images, >= 0; 0: the main thread does it.
            `auto`: one a core, up to 8, for a transformers processor; none on a single core or for
            a plain callable, which threads may not share.
        pixel_cache_mb: Memory for processed images that several calibrations of one run share
            (presets), in MiB, >= 0. Images beyond it are processed again.
        cache_dir: Folder that keeps processed images for other runs; None: none are kept.
    """

    ridge_lambda: float = 0.05
    mix_alpha: float = 0.3
    anchor_rho: float = 2.0
    eps: float = 1e-8
    order: str = "block"
    target: str = "module"
    ridge: str = "fixed"
    stages: int = 1
    first_ridge_scale: float = 1.0
    task_weights: Any = None
    row_weights: str = "uniform"
    augment: Any = None
    held_out: int | str = 0
    trials: int | str = 1
    strict: bool = False
    samples_per_task: int = 256
    batch_size: int = 16
    seed: int = 42
    calibrate_bias: bool = True
    calibrate_norm: bool = True
    batch_norm: str = "reestimate"
    modules: Sequence[str] | None = None
    token_weights: str = "uniform"
    decoder_rows: str = "all"
    calibration_split: str = "train"
    calibration_data: Mapping[str, Any] | None = None
    calibration_targets: str = "labels"
    generated_tokens: int = 64
    max_length: int | None = None
    family: Any = "auto"
    ignore_config: Sequence[str] = ()
    stream_experts: bool | str = "auto"
    expert_read_budget: float | str | None = None
    log_drift: bool = True
    linear_kernel: str = "auto"
    sums_precision: str = "auto"
    activations: str = "auto"
    activations_dir: str | None = None
    checkpoint_dir: str | None = None
    resume: bool = False
    decode_workers: int | str = "auto"
    pixel_cache_mb: float = 512
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        problems = problems_of(self, CHECKS)
        if self.resume is True and self.checkpoint_dir is None:
            problems.append("resume needs method.checkpoint_dir, the folder that keeps the blocks")
        if self.stream_experts is False and self.expert_read_budget is not None:
            problems.append(
                "expert_read_budget needs experts that are read block by block, and "
                "method.stream_experts=false loads them whole; set it to auto"
            )
        problems += self._clashes() + self._without_held_out()
        if problems:
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))
        for name in ("ridge_lambda", "mix_alpha", "anchor_rho", "eps", "first_ridge_scale"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("activations_dir", "cache_dir", "checkpoint_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if self.modules is not None:
            object.__setattr__(self, "modules", tuple(self.modules))
        object.__setattr__(self, "ignore_config", tuple(self.ignore_config))

    def _clashes_of_ablations(self) -> list[str]:
        """A phrase for each ablation that the other settings do not allow."""
        clashes = [
            f"{name}={value} needs method.target=module and method.ridge=fixed, and no "
            "method.order=module"
            for name, value in (("order", "model"), ("task_weights", "equal"))
            if getattr(self, name) == value and not self.is_paper
        ]
        if self.order == "model" and (self.held_out != 0 or self.checkpoint_dir is not None):
            clashes.append(
                "order=model changes all blocks at the end: set method.held_out=0 and "
                "method.checkpoint_dir=null"
            )
        return clashes

    def _clashes(self) -> list[str]:
        """A phrase for each setting that has no part in what the others ask for."""
        clashes: list[str] = []
        if self.stages == 2 and self.ridge != "kfold":
            clashes.append("stages=2 needs method.ridge=kfold")
        if self.first_ridge_scale != 1 and self.stages == 1:
            clashes.append(f"first_ridge_scale={self.first_ridge_scale} needs method.stages=2")
        if self.trials not in (1, "auto") and self.expert_read_budget is not None:
            clashes.append("expert_read_budget is for one calibration: set method.trials=1")
        clashes += self._clashes_of_ablations()
        if self.is_paper:
            clashes += [
                f"{name}={getattr(self, name)} needs method.order=module, method.target=residual "
                "or method.ridge=kfold"
                for name in ("row_weights", "task_weights")
                if getattr(self, name) not in (getattr(FeatCalSettings, name), "equal")
            ]
            return clashes
        if self.calibrate_norm:
            clashes.append(
                "calibrate_norm must be false unless method.order=block, method.target=module and "
                "method.ridge=fixed"
            )
        if self.token_weights != "uniform":
            clashes.append(
                f"token_weights={self.token_weights} needs method.order=block, "
                "method.target=module and method.ridge=fixed"
            )
        if self.ridge == "kfold":
            clashes += [
                f"{name}={getattr(self, name)} has no part in method.ridge=kfold: leave it at its "
                f"default, {getattr(FeatCalSettings, name)}"
                for name in ("ridge_lambda", "mix_alpha", "eps")
                if getattr(self, name) != getattr(FeatCalSettings, name)
            ]
            if self.stages == 1 and self.anchor_rho not in (1, FeatCalSettings.anchor_rho):
                clashes.append(
                    f"anchor_rho={self.anchor_rho} has no part in method.ridge=kfold with "
                    f"method.stages=1: leave it at its default, {FeatCalSettings.anchor_rho}"
                )
        return clashes

    def _without_held_out(self) -> list[str]:
        """A phrase for each setting that held-out samples are missing for."""
        if self.held_out != 0:
            return [] if self.log_drift else ["held_out needs method.log_drift=true"]
        wanting = {
            "strict=true": self.strict is True,
            f"trials={self.trials}": self.trials != 1,
            "task_weights=drift": self.task_weights == "drift",
        }
        return [f"{name} needs method.held_out, such as auto" for name in wanting if wanting[name]]

    @classmethod
    def plus(cls, **changes: Any) -> "FeatCalSettings":
        """Settings of FeatCal+ (docs/plus.md).

        Args:
            **changes: Other values by name, as the settings take them.

        Raises:
            ValueError: If a value is out of range.
            TypeError: If a name is no setting.
        """
        return cls(**{**PLUS, **changes})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings, in order of declaration."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def replace(self, **changes: Any) -> "FeatCalSettings":
        """Copy with some settings changed.

        Args:
            **changes: New values by name.

        Returns:
            The checked copy.

        Raises:
            ValueError: If a value is out of range.
            TypeError: If a name is no setting.
        """
        return dataclasses.replace(self, **changes)

    def with_paper_update(self) -> "FeatCalSettings":
        """Copy in which modules are solved as the paper has it: where a pool's presets begin."""
        if self.is_paper:
            return self
        kept = () if self.decoder_rows == "auto" else ("decoder_rows",)
        names = {*PLUS, "first_ridge_scale", "strict"}.difference(kept)
        return self.replace(**{name: getattr(FeatCalSettings, name) for name in names})

    @property
    def is_paper(self) -> bool:
        """Return whether modules are solved as the paper has it."""
        return self.order != "module" and (self.target, self.ridge) == ("module", "fixed")

    @property
    def needs_base(self) -> bool:
        """Return whether anchors are made of the base model."""
        return self.anchor_rho != 1 and (self.ridge == "fixed" or self.stages == 2)

    @property
    def runs_experts(self) -> bool:
        """Return whether experts run: a target without their features needs only their weights."""
        return self.mix_alpha > 0 or self.log_drift or not self.is_paper

    @property
    def task_factors(self) -> Mapping[str, float]:
        """Factors of the tasks' weights that are given as such."""
        return self.task_weights if isinstance(self.task_weights, Mapping) else {}

    def of_one_trial(self) -> "FeatCalSettings":
        """Copy for one calibration of what may be several."""
        weights = None if self.task_weights == "drift" else self.task_weights
        return self.replace(trials=1, strict=False, task_weights=weights)

    def of_the_model(self) -> "FeatCalSettings":
        """Copy in which everything without a part in the model has its default."""
        return self.replace(
            **{name: getattr(FeatCalSettings, name) for name in SETTINGS_OF_THE_RUN}
        )

    def described(self) -> str:
        """The settings that differ from the defaults, for people."""
        usual, own = FeatCalSettings().as_dict(), self.as_dict()
        changed = [f"{name}={own[name]}" for name in own if own[name] != usual[name]]
        return ", ".join(changed) or "default settings"

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, fit for JSON and YAML."""
        values = {name: getattr(self, name) for name in self.names()}
        values["modules"] = None if self.modules is None else list(self.modules)
        values["ignore_config"] = list(self.ignore_config)
        if not isinstance(self.family, str):
            values["family"] = _describe_mapping(self.family)
        for name in ("augment", "calibration_data", "task_weights"):
            if isinstance(getattr(self, name), Mapping):
                values[name] = _describe_mapping(getattr(self, name))
        return values


def _describe_mapping(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    return repr(given)
