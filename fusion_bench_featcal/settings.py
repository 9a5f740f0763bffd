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
    "rule": "plus",
    "task_weights": "drift",
    "augment": "auto",
    "held_out": "auto",
    "decoder_rows": "auto",
    "calibrate_norm": False,
}
"""FeatCal+, as `config/featcal_settings/plus.yaml` has it for the command line."""


OF_THE_PAPER = ("ridge_lambda", "mix_alpha", "anchor_rho", "eps")
"""Numbers that only the paper's rule has."""


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
            to 1000.
        eps: Stabiliser added to the system's diagonal and floor of the task weight's norm
            (Eqs. 14, 17), 0 to 1e12.
        rule: How a block is solved: `paper`: all modules from one look at it, with `ridge_lambda`,
            `mix_alpha`, `anchor_rho` and `eps` (Algorithm 1); `plus`: groups of modules one after
            another, with rows out of the experts' weights and ridges chosen by held-out error
            (docs/plus.md), for which these four have no part; or a mapping with the class of a rule
            of one's own and its settings (`{_target_: my_module.MyRule, option: 1}`).
        task_weights: Factors of the tasks' weights by task (null: 1 each; tasks that are not named
            have 1), or `drift`: where a calibration leaves a task far behind, a second one gives it
            more weight, and is kept if held-out samples agree.
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
        strict: Whether a run fails where, on held-out samples, final features of a task are not
            closer to its expert's than the merged model's are. Without it that is a warning.
        samples_per_task: Calibration samples drawn for each task, >= 1; fewer: all of them.
        batch_size: Samples that run through a block together, >= 1. Changes memory and rounding.
        seed: Seeds each task's own draw of samples, together with the task's name, >= 0.
        calibrate_bias: Whether biases are calibrated (Eqs. 51-55).
        calibrate_norm: Whether gains and shifts of LayerNorm and GroupNorm are calibrated
            (Eqs. 56-59).
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
            with AVX-512. The two round differently: a resumed run needs the same one.
        sums_precision: Precision of the products that accumulate the Gram and cross matrices.
            `auto`: float64 for a `ridge_lambda` below 0.01, which float32 rounding would reach the
            update through, else float32. `float32`, `float64`; `tf32`, faster on a GPU and the same
            as float32 elsewhere; `bfloat16`: rounded features, faster still on a GPU. TF32 and
            bfloat16 products are added up in float32.
        activations: Where samples' features wait between blocks: on the `device`, in `host` memory
            (pinned beside a GPU), in files on `disk` that are mapped when they are read, or `auto`:
            the device. Changes memory alone.
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
    rule: Any = "paper"
    task_weights: Any = None
    augment: Any = None
    held_out: int | str = 0
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
        for name in OF_THE_PAPER:
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("activations_dir", "cache_dir", "checkpoint_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if self.modules is not None:
            object.__setattr__(self, "modules", tuple(self.modules))
        object.__setattr__(self, "ignore_config", tuple(self.ignore_config))

    def _clashes(self) -> list[str]:
        """Return a phrase for each setting that has no part in the rule."""
        if self.rule == "paper" and self.task_weights is not None:
            return ["task_weights has no part in method.rule=paper: set method.rule=plus"]
        if not isinstance(self.rule, str | Mapping):
            return [
                f"{name}={getattr(self, name)} is no setting of a rule that is given as an object: "
                f"set it there, {type(self.rule).__name__}({name}=...)"
                for name in (*OF_THE_PAPER, "calibrate_bias", "calibrate_norm")
                if getattr(self, name) != getattr(FeatCalSettings, name)
                and getattr(self, name) != getattr(self.rule, name, None)
            ]
        if self.rule != "plus":
            return []
        clashes = [
            f"{name}={getattr(self, name)} has no part in method.rule=plus: leave it at its "
            f"default, {getattr(FeatCalSettings, name)}"
            for name in OF_THE_PAPER
            if getattr(self, name) != getattr(FeatCalSettings, name)
        ]
        if self.calibrate_norm:
            clashes.append(
                "rule=plus needs method.calibrate_norm=false, as method=featcal/plus has"
            )
        return clashes

    def _without_held_out(self) -> list[str]:
        """A phrase for each setting that held-out samples are missing for."""
        if self.held_out != 0:
            return [] if self.log_drift else ["held_out needs method.log_drift=true"]
        wanting = {
            "strict=true": self.strict is True,
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
        """Copy with the paper's rule: where a pool's presets begin."""
        if self.rule == "paper":
            return self
        kept = () if self.decoder_rows == "auto" else ("decoder_rows",)
        names = {*PLUS, "strict"}.difference(kept)
        return self.replace(**{name: getattr(FeatCalSettings, name) for name in names})

    @property
    def needs_base(self) -> bool:
        """Return whether there must be a base model."""
        of_paper = self.anchor_rho != 1 and self.rule != "plus"
        return getattr(self.rule, "needs_base", of_paper)

    @property
    def task_factors(self) -> Mapping[str, float]:
        """Factors of the tasks' weights that are given as such."""
        return self.task_weights if isinstance(self.task_weights, Mapping) else {}

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
        for name in ("family", "rule"):
            if not isinstance(values[name], str):
                values[name] = _describe_mapping(values[name])
        for name in ("augment", "calibration_data", "task_weights"):
            if isinstance(getattr(self, name), Mapping):
                values[name] = _describe_mapping(getattr(self, name))
        return values


def _describe_mapping(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    return repr(given)
