"""Settings that belong to a rule, and the rule object that they make."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.files.classes import RULES, installed_classes, named_class
from fusion_bench_featcal.settings.fields import Settings, is_mapping_to, is_number, setting

if TYPE_CHECKING:
    from fusion_bench_featcal.rules import Rule

BY_NAME: Mapping[str, str] = {
    "paper": "fusion_bench_featcal.rules.paper.Paper",
    "plus": "fusion_bench_featcal.rules.plus.Plus",
}
"""`rule` -> its class, imported when it is needed."""

# Gram matrices have norm 1: a larger ridge leaves no digit of float64 for the data.
_LARGEST_RIDGE = 1e12
_STRONG_RIDGE, _FAR_ANCHOR = 100, 10  # numbers from which a note says what they do


def _is_rule(value: object) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("_target_"), str)
    if isinstance(value, str):
        return value in BY_NAME or value in installed_classes(RULES)
    return hasattr(value, "turns")


def is_factor(value: Any) -> bool:
    """Return whether a value can be a weight of a task."""
    return is_number(value) and value > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleSettings(Settings):
    """The rule and the settings of all rules. Each rule has some of these."""

    ridge_lambda: float = setting(
        0.05,
        "Strength of the pull towards the anchor (lambda, Eq. 15). Gram matrices have norm 1.",
        ge=0,
        le=_LARGEST_RIDGE,
        convert=float,
    )
    mix_alpha: float = setting(
        0.3,
        "Share of the expert's features in the target input (alpha, Eq. 10).",
        ge=0,
        le=1,
        convert=float,
    )
    anchor_rho: float = setting(
        2.0,
        "Position of the anchor (rho, Eq. 11): 0 is the base, 1 the merged model, 2 twice as far.",
        ge=-1000,
        le=1000,
        convert=float,
    )
    rule: Any = setting(
        "paper",
        "How a block is solved. `paper`: all modules at once (Algorithm 1). `plus`: FeatCal+, "
        "which solves groups of modules in turn and has none of the three settings above "
        "(docs/reference/formulas.md). Other rules: one of an installed package, or your own, "
        "{_target_: my_module.MyRule, option: 1}.",
        accepts="paper, plus, a name that an installed package registers, a mapping with "
        "`_target_` and the rule's settings, or a rule",
        check=_is_rule,
    )
    task_weights: Mapping[str, float] | None = setting(
        None,
        "Factors by which the tasks' weights are multiplied, {task: factor}. Other tasks have 1. "
        "FeatCal+ only.",
        accepts="a mapping of tasks to numbers above 0",
        check=lambda value: is_mapping_to(is_factor, value),
    )
    balance: float = setting(
        0.0,
        "Equal treatment of tasks: a second calibration multiplies each task's weight by this "
        "power of its distance from its expert. 1 treats tasks more equally, 0 calibrates only "
        "once. FeatCal+ only.",
        ge=0,
        le=4,
        convert=float,
    )
    task_vectors_only: bool | None = setting(
        None,
        "Change weights only along the experts' task vectors. Null: only if the samples fit no "
        "task. False: never, which suits tasks that read the same inputs. FeatCal+ only.",
    )
    calibrate_bias: bool = setting(True, "Calibrate biases (Eqs. 51-55).")
    calibrate_norm: bool | None = setting(
        None,
        "Calibrate gains and shifts of LayerNorm and GroupNorm (Eqs. 56-59). Null: the rule's "
        "default.",
        by_rule=True,
    )

    def make_rule(self) -> "Rule":
        """Return the rule object for the settings.

        A class that `_target_` names gets the settings that are among its fields, and the other
        keys of the mapping. If `rule` is an object, it is returned unchanged.

        Raises:
            ValueError: If the class cannot be imported, is not a rule or rejects an argument, or if
                a setting is changed that the rule does not have.
        """
        if not isinstance(self.rule, str | Mapping):
            name = type(self.rule).__name__
            self._refuse_changes(self.rule, name, f"set it there, {name}(...)")
            return self.rule
        options = {} if isinstance(self.rule, str) else dict(self.rule)
        target = options.pop("_target_", self.rule)
        dotted = BY_NAME.get(target) or installed_classes(RULES).get(target, target)
        kind = named_class(dotted, "rule", "MyRule")
        if not is_dataclass(kind) or not hasattr(kind, "turns"):
            raise ValueError(f"rule: {target} is not a rule, a dataclass with turns and sums")
        names = [field.name for field in fields(kind) if field.init]
        values = {name: value for name, value in self.by_name.items() if name in names}
        self._refuse_changes(kind, target, "", values)
        refuse_unknown(options, names, f"rule: {target}: option ")
        values = {name: value for name, value in values.items() if value is not None}
        try:
            return kind(**values | options)  # type: ignore[return-value]
        except Exception as error:  # a user's class may raise anything
            typed = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ValueError(f"rule: {target}({typed}): {error}") from error

    rule_object = cached_property(make_rule)
    """The rule object for the settings, created once."""

    def _refuse_changes(
        self, rule: object, rule_name: str, remedy: str, shared: Collection[str] = ()
    ) -> None:
        """Refuse settings of other rules, unless they have their default or the rule's value.

        Args:
            rule: The rule, or its class.
            rule_name: Its name in the message.
            remedy: Advice in the message, or empty for that of `remedy_of`.
            shared: Settings that the rule takes.
        """
        for name in (name for name in RULE_SETTINGS if name not in shared):
            value = getattr(self, name)
            if value not in (getattr(RuleSettings, name), getattr(rule, name, None)):
                text = remedy or remedy_of(name)
                raise ValueError(
                    f"{option(name, value)} has no effect with the rule {rule_name}: {text}"
                )

    @property
    def strengths(self) -> dict[str, float]:
        """The numbers of the paper's rule by name. Empty for other rules."""
        return {name: getattr(self, name) for name in STRENGTHS if self.rule == "paper"}

    @property
    def extremes(self) -> list[str]:
        """Warnings about numbers of the paper's rule that are so large that data hardly count."""
        sentences, strengths = [], self.strengths
        if (ridge := strengths.get("ridge_lambda", 0)) >= _STRONG_RIDGE:
            sentences.append(
                f"{option('ridge_lambda', f'{ridge:g}')} is very large: Gram matrices have "
                "norm 1, so the samples hardly count"
            )
        if abs(rho := strengths.get("anchor_rho", 0)) > _FAR_ANCHOR:
            sentences.append(
                f"{option('anchor_rho', f'{rho:g}')} is far: the anchor is {abs(rho):g} times "
                "as far from the base as the merged model"
            )
        return sentences


STRENGTHS = ("ridge_lambda", "mix_alpha", "anchor_rho")
"""The numbers of the paper's rule. FeatCal+ has none of them."""
PLUS_SETTINGS = ("task_weights", "balance", "task_vectors_only")
"""Settings that only FeatCal+ has."""
RULE_SETTINGS = tuple(name for name in RuleSettings.names() if name != "rule")
"""Settings that a rule has as fields, or does not have."""


def remedy_of(setting: str) -> str:
    """Return the advice where the rule does not have a setting of `RULE_SETTINGS`."""
    rule = option("rule", "plus" if setting in PLUS_SETTINGS else "paper")
    return f"leave it at its default, or choose {rule}"
