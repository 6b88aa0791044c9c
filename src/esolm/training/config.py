"""`RunConfig`, the complete configuration of a training run, from a preset or a YAML file with overrides."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from ..runtime.dotted import flat, listed, merged, nest
from ..runtime.parsers import new_parser, wrong_type
from ..runtime.signatures import class_in, literal, modules, signature
from .options import Batching, Compute, CorpusOptions, Distill, Optim, Saving, Tuning, Validation

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..net.denoiser import DenoiserConfig
    from ..systems import System

SIZES = (
    "layers", "width", "heads", "cond_width", "adaln", "mlp_ratio", "rotary_base", "kv_heads", "head_width",
    "mlp_width", "mlp", "norm", "norm_eps", "norm_bias", "qk_norm", "qkv_bias", "out_bias", "mlp_bias", "head_bias",
    "tied", "positions", "rotary_factor", "rotary_length", "rotary_low", "rotary_high",
)  # fmt: skip
"""Options of the network that the weights of `init` determine."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a training run; `esolm train`, `esolm plan` and `Trainer` use it.

    Make one with `preset` or `from_tree`, which check names and types; change one with `dataclasses.replace`.
    """

    data: str = "data/pydocs"
    """A folder that `esolm prepare` made."""
    run: str | None = None
    """The run folder; null is runs/PRESET."""
    init: str | None = None
    """Start from the weights of a run, a checkpoint or a model."""
    adapter: str | None = None
    """With init: a folder with a LoRA adapter for that model, which tuning.parts lora trains on, and others merge."""
    steps: int = 1000
    """Number of training steps."""
    seed: int = 0
    """Determines the initial weights, the data order and all noise."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Loggers besides metrics.jsonl."""
    batch: Batching = field(default_factory=Batching)
    optim: Optim = field(default_factory=Optim)
    tuning: Tuning = field(default_factory=Tuning)
    distill: Distill = field(default_factory=Distill)
    compute: Compute = field(default_factory=Compute)
    validation: Validation = field(default_factory=Validation)
    saving: Saving = field(default_factory=Saving)
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    net: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DenoiserConfig` except vocab_size and latent_width; length null is that of the data."""
    system: Mapping[str, Any] = field(default_factory=lambda: {"name": "esolm"})
    """The name of the system and its options."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise ValueError(f"log_every is {self.log_every}; it must be at least 1")

    @classmethod
    def groups(cls) -> dict[str, type]:
        """The option groups by name."""
        made: dict[str, Any] = {each.name: each.default_factory for each in dataclasses.fields(cls)}
        return {name: kind for name, kind in made.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}

    @classmethod
    def preset(cls, name: str, /, **overrides: Any) -> Self:
        """The configuration of a preset or a YAML file, with overrides.

        overrides: nested dicts or dotted keys, as in `steps=500, optim={"lr": 1e-3}` or `**{"optim.lr": 1e-3}`.
        """
        above = {key: _plain(value) for key, value in flat(overrides).items()}
        sizes = [size for size in SIZES if f"net.{size}" in above]
        if (init := above.get("init")) is not None and sizes:
            raise ValueError(f"the weights of init {init} determine net.{sizes[0]}: leave it out")
        tree = read_preset(name)
        tree.pop("starts_from", None)
        config = cls.from_tree(_over(tree, nest(above)), name)
        short = Path(name).name.removesuffix(".yaml").removesuffix(".yml")  # not the stem: qwen3-0.6b has a dot
        return config if config.run is not None else dataclasses.replace(config, run=f"runs/{short}")

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], name: str = "the configuration") -> Self:
        """The configuration that a nested dict holds, as `tree` returns it; missing keys take their defaults.

        name: where the dict comes from, for error messages.
        """
        parser = new_parser()
        known = add_options(parser, flat(tree).get("system.name", "esolm"), cls)
        for key in flat(tree):
            if key not in known:
                raise ValueError(f"unknown key {key!r} in {name}: the nearest known ones are {nearest(key, known)}")
        try:
            checked = parser.parse_object(nest(flat(tree))).as_dict()
        except argparse.ArgumentError as error:
            where = f"{name}: " if name.endswith((".yaml", ".yml")) else ""
            if (wrong := wrong_type(str(error), parser._actions)) is None:
                raise ValueError(f"{where}{' '.join(str(error).split())}") from error
            value = flat(tree).get(wrong.option, wrong.value)
            raise ValueError(f"{where}{wrong.option} is {value!r}; it must be {wrong.allowed}") from error
        groups = {key: group(**checked.pop(key)) for key, group in cls.groups().items()}
        return cls(**{**checked, **groups, "log": tuple(checked["log"])})

    def tree(self) -> dict[str, Any]:
        """The configuration as a nested dict of plain values, as config.yaml holds it."""
        return listed(dataclasses.asdict(self))

    def net_config(self, vocab_size: int, length: int, system: System) -> DenoiserConfig:
        """The sizes of the network for data of this vocabulary and length, and for this system."""
        from ..net.denoiser import DenoiserConfig

        asked = self.net.get("length")
        if asked is not None and asked < length:
            raise ValueError(f"net.length {asked} is below the {length} tokens of an example: leave it out")
        own = {"length": asked or length, "latent_width": system.latent_width}
        return DenoiserConfig(vocab_size=vocab_size, **{**self.net, **own})

    def make_system(self, ids: Any) -> System:
        """The system with its options; ids: a manifest or a tokenizer, for its special ids."""
        from ..systems import FROM_DATA, find

        options = dict(self.system)
        system = find(options.pop("name"))
        own = {each.name for each in dataclasses.fields(system)} & set(FROM_DATA)
        return system(**options, **{name: getattr(ids, name) for name in own})


def add_options(parser: Any, system: str, config: type[RunConfig] = RunConfig) -> set[str]:
    """Add every option of a run of the named system to a jsonargparse parser, and return their dotted names."""
    from ..net.config import DenoiserConfig

    added = set[str]()
    for cls in (cls for cls in config.__mro__ if dataclasses.is_dataclass(cls)):
        # Not add_class_arguments, which would import what this module imports for type checkers alone.
        own = signature(cls.__module__, cls.__name__)
        parser.add_function_arguments(own, as_group=False, skip=added & _parameters(own))
        added |= _parameters(own)
    for key, group in config.groups().items():
        parser.add_class_arguments(group, key)
    parser.add_class_arguments(DenoiserConfig, "net", skip={"vocab_size", "length", "latent_width"})
    parser.add_argument("--net.length", type=int | None, default=None, help="Tokens in an example; null: the data's.")
    parser.add_argument("--system.name", type=str, default=system, help="A system of esolm, or package.module.Class.")
    add_system(parser, system)
    return set(flat(parser.get_defaults().as_dict()))


def add_system(parser: Any, system: str) -> None:
    """Add the options of a system; those of this package are read from the source, without importing PyTorch."""
    from_data = set(literal("esolm.systems", "FROM_DATA"))
    if system in modules("esolm.systems"):
        own = signature(module := f"esolm.systems.{system}", class_in(module, "System", "AnyOrder"))
        parser.add_function_arguments(own, "system", skip=from_data & _parameters(own))
        return
    from ..systems import find

    cls = find(system)
    parser.add_class_arguments(cls, "system", skip=from_data & {each.name for each in dataclasses.fields(cls)})


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def preset_names() -> list[str]:
    """The presets of the package; names that start with an underscore are only bases of others."""
    return sorted(name for name in _files() if not name.startswith("_"))


def _files() -> dict[str, Any]:
    files = (resources.files("esolm") / "presets").iterdir()
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def read_preset(name: str) -> dict[str, Any]:
    """The tree of a preset or a YAML file, merged over its `base`.

    Besides options it may have `starts_from`: what `init` must name, in words.
    """
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ValueError(f"no file {name}: give a YAML file or one of the presets {', '.join(preset_names())}")
        text = Path(name).read_text()
    elif name in (files := _files()):
        text = files[name].read_text()
    else:
        near = nearest(name, preset_names())
        if (Path(name) / "config.yaml").is_file():
            raise ValueError(f"{name} is a run: to resume it, repeat its command (a preset, --run {name}, its options)")
        raise ValueError(f"no preset {name!r}: the nearest are {near}. There are {', '.join(preset_names())}")
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{name} must hold keys and values, not {type(tree).__name__}")
    tree = dict(tree)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if base.endswith((".yaml", ".yml")):
        base = str(Path(name).parent / base)
    return _over(read_preset(base), tree)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees; where the upper one names another system, the lower one's system options are dropped."""
    name = flat(above).get("system.name")
    if name is not None and name != flat(below).get("system.name"):
        below = {key: value for key, value in below.items() if key != "system"}
    return merged(below, above)


def _plain(value: Any) -> Any:
    return fspath(value) if isinstance(value, PathLike) else value


def nearest(key: str, known: Iterable[str]) -> str:
    """The three known keys most similar to this one, compared whole or by their last part."""

    def likeness(other: str) -> float:
        pairs = ((key, other), (key.rpartition(".")[2], other.rpartition(".")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return ", ".join(sorted(known, key=likeness, reverse=True)[:3])
