"""FusionBench methods that run one rival, such as `method=surgery`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from fusion_bench_featcal.fusionbench.method import Method, MethodResult
from fusion_bench_featcal.fusionbench.post_merging_algorithm import PostMergingAlgorithm
from fusion_bench_featcal.fusionbench.run_settings import MergedBy, plain_config
from fusion_bench_featcal.lab import rivals
from fusion_bench_featcal.results.run import Facts


class MethodAlgorithm(PostMergingAlgorithm):
    """A FusionBench method that runs one `Method`, whose settings are the keys.

    A method that improves a merged model has one more key: `base_method`, the config of the
    upstream merger. Null takes the pool's `_merged_` model. A subclass sets `method_class`.
    """

    method_class: ClassVar[type[Method]]

    def __init_subclass__(cls, **options: object) -> None:
        """Take the keys from the settings of the method."""
        is_merger = hasattr(cls.method_class, "merge")
        cls.settings_classes = [cls.method_class] if is_merger else [cls.method_class, MergedBy]
        super().__init_subclass__(**options)

    @property
    def methods(self) -> Mapping[str, Method]:
        """The method by its name."""
        return {self.method_class.name: self.settings_objects[0]}

    def facts(self, name: str, result: MethodResult) -> Facts:
        """Return what the report says. As in comparisons, a merger's settings are its config."""
        facts = super().facts(name, result)
        config = plain_config(getattr(self._program, "_method", None)) if self.is_merger else None
        return replace(facts, settings=config) if config else facts


def _algorithm(method_class: type[Method]) -> type[MethodAlgorithm]:
    """Return the FusionBench method that runs a method."""
    doc = f"`method={method_class.option}`."
    members = {"method_class": method_class, "__doc__": doc, "__module__": __name__}
    return type(f"{method_class.__name__}Algorithm", (MethodAlgorithm,), members)


_METHOD_CLASSES = [getattr(rivals, name) for name in rivals.METHODS]
ALGORITHMS = {cls.option: _algorithm(cls) for cls in _METHOD_CLASSES}
"""Name on the command line, `method=<option>` -> class."""

# YAML names the classes, such as `SurgeryAlgorithm`.
globals().update({cls.__name__: cls for cls in ALGORITHMS.values()})
