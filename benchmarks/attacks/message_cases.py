"""A mistake ends in one short block that names the place and the remedy."""

from pathlib import Path

from attacks.files import shown
from attacks.judging import REFUSED, RIGHT, case, expect
from attacks.paths import METHODS
from attacks.worlds import World

# --- a mistake ends in one block ---

_MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a setting out of range": (("method.mix_alpha=7",), ("mix_alpha", "7")),
    "several settings out of range": (
        ("method.mix_alpha=7", "method.ridge_lambda=-1", "method.seed=x"),
        ("mix_alpha", "ridge_lambda", "seed"),
    ),
    "a setting that is none": (("+method.ridge_lamda=1",), ("ridge_lamda", "ridge_lambda")),
    "a merger without the @": (("method.base_method=simple_average",), ("method@method",)),
    "a model that does not exist": (("modelpool.models.one=/nowhere/at/all",), ("nowhere", "one")),
    "a model entry that is a number": (("modelpool.models.one=5",), ("one", "modelpool.models")),
    "a model entry that is null": (("modelpool.models.one=null",), ("one", "modelpool.models")),
    "a merger of a missing module": (
        ("method.base_method._target_=nowhere.Merger",), ("nowhere", "base_method"),
    ),
    "data of a missing module": (
        ("modelpool.train_datasets.one._target_=nowhere.load",), ("nowhere", "one"),
    ),
    "data by a function that is not there": (
        ("modelpool.train_datasets.one._target_=fusion_bench_featcal.tasks.load_imags",),
        ("load_imags", "one"),
    ),
    "a model pool of a missing module": (
        ("modelpool._target_=nowhere.Pool",), ("nowhere", "modelpool"),
    ),
    "a task pool of a missing module": (
        ("modelpool.default_taskpool._target_=nowhere.Pool",), ("nowhere", "taskpool"),
    ),
    "a family that does not exist": (("method.family=bert",), ("family", "replay")),
    "class names that are null": (
        ("modelpool.default_taskpool.tasks.one.classnames=[a,null]",), ("one", "classnames"),
    ),
    "too few class names": (
        ("modelpool.default_taskpool.tasks.one.classnames=[a,b]",), ("one", "classnames"),
    ),
    "a resume without checkpoints": (("method.resume=true",), ("resume", "checkpoint_dir")),
    "a log directory that is a file": (("path.log_dir=/etc/hostname",), (r"path\.log_dir",)),
}  # fmt: skip
for _name, (_words, _says) in _MISTAKES.items():

    @case(f"messages: {_name}", *_says, must=REFUSED)
    def _(folder: Path, words: tuple[str, ...] = _words) -> None:
        World(folder).command(*words).succeeded()


for _setting in ("HYDRA_FULL_ERROR=1", "method.debug=true"):

    @case(f"messages: {_setting} shows all", must=RIGHT)
    def _(folder: Path, setting: str = _setting) -> None:
        words, environment = ("method.ridge_lambda=1e300",), {}
        if setting.startswith("method"):
            words = (*words, f"++{setting}")
        else:
            environment = dict([setting.split("=")])
        screen = World(folder).command(*words, environment=environment)
        expect(screen.code != 0, "it ended well")
        expect("no setting" not in screen.text, "there is no such setting")
        expect("Traceback (most recent call last)" in screen.text, "no traceback is shown")


@case("messages: an error within a run", "one", r"\.png", must=REFUSED)
def _(folder: Path) -> None:
    world = World(folder)
    next(world.data("one", "train").rglob("*.png")).write_bytes(b"no picture")
    world.command("method.samples_per_task=12").succeeded()


@case("messages: featcal report of nothing", "no such run|no run", must=REFUSED)
def _(folder: Path) -> None:
    shown("report", str(folder / "nowhere"))


_MISSPELT: dict[str, tuple[str, str]] = {
    name: ("seeed", "seed")
    for name in METHODS
    if not name.endswith("anchor_only")  # which has no seed
}
_MISSPELT["featcal_baselines/anchor_only"] = ("anchor_roh", "anchor_rho")
del _MISSPELT["featcal_mergers/wudi_language_models"]  # FusionBench's own method
for _name, (_wrong, _right) in _MISSPELT.items():

    @case(f"names: {_wrong} is no setting of {_name}", _wrong, rf"\b{_right}\b", must=REFUSED)
    def _(folder: Path, name: str = _name, wrong: str = _wrong) -> None:
        World(folder).command(f"method={name}", f"+method.{wrong}=1").succeeded()
