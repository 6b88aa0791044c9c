"""The systems, one file each, and the contract that all of them keep. Imports core, net and sampling.

A system is a frozen dataclass whose fields are its hyperparameters. Everything that the rest of the library asks of a
system is a member of `System` below, so a new system is one file, inside the package or outside of it.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar, cast

from torch import Tensor

from ..core.batch import Batch
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..net.protocol import Forward, Network
from ..sampling.request import Request, Step

S = TypeVar("S", bound="System")


class System(Protocol):
    """How a network is trained and sampled. Subclass it to get the defaults of the optional members.

    Required: `mask_id`, `samplers`, `terms`, `counts`, `plan`, `sample`. The mask id belongs to the system; the network
    knows none.
    """

    samplers: ClassVar[Mapping[str, tuple[str, ...]]]
    """Each sampler and the sampling options it takes, besides those that every sampler takes."""

    @property
    def mask_id(self) -> int:
        """The id of the mask token; training sets it from the data."""
        ...

    @property
    def name(self) -> str:
        """What `find` takes: the module's name for a system of the package, `package.module.Class` elsewhere."""
        return name_of(type(self))

    @property
    def block_size(self) -> int:
        """Tokens that are sampled as a unit; a length must be a multiple of it."""
        return 1

    @property
    def exact(self) -> bool:
        """Whether `terms` is the negative log-likelihood itself and not a bound."""
        return False

    @property
    def masks(self) -> bool:
        """Whether noise replaces tokens by the mask; otherwise nothing marks the tokens that it spared."""
        return True

    @property
    def timed(self) -> bool:
        """Whether the network is fed the time. Its conditioning then cannot be folded into the weights."""
        return False

    @property
    def latent_width(self) -> int | None:
        """Width of the embeddings that the system adds noise to, by passes with a `VectorPass`; None: it takes tokens.

        Training builds the network with it. Such a system cannot be served: its passes cannot be shared.
        """
        return None

    @property
    def soft_inputs(self) -> bool:
        """Whether training feeds probabilities of all tokens, [B, L, V], which `esolm plan` counts."""
        return False

    @property
    def any_order(self) -> bool:
        """Whether the system is an `AnyOrder`: it has a likelihood of x under an order."""
        return False

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The named terms of the loss (train) or of the bound (not train), in nats per token, [B', L].

        In training the network is called exactly once, whatever the rows: ranks that share its weights stay in step.
        """
        ...

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        """For each term, the number of tokens that it is normalised by; scored, bool [B, L], as in `Batch.scored`."""
        ...

    def at_step(self: S, step: int) -> S:
        """The system as it trains in this step, 0, 1, …; a curriculum makes it differ from step to step."""
        return self

    def alternatives(self: S) -> list[S]:
        """The versions of the system among which each validation chooses: training continues with the one whose loss
        varies least between blocks of `block_size` tokens. None by default."""
        return []

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        """The complete denoising schedule of a request; raises ValueError for what this system cannot do."""
        ...

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Carry out a schedule, one network call per step. A step of a `Chain` may change tokens of earlier ones."""
        ...

    def schedule_nats(self, net: Forward, x: Tensor, schedule: Schedule, temperature: float = 1.0) -> Tensor:
        """-log p of each drawn token of samples x, as `sample` draws it by this schedule at this temperature, [B, L].

        Zero at given tokens and padding. Differentiable, in one network call.
        """
        raise ValueError(f"{self.name} defines no likelihood of a sample given its schedule: use esolm (B), mdlm or ar")

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] of the token at each position of partly masked sequences, as sampling would see them.

        sigma, int [B, L]: for any-order systems, the order in which tokens see each other.
        """
        raise ValueError(f"{self.name} defines no logits for partly masked sequences")

    @property
    def has_next_logits(self) -> bool:
        """Whether `next_logits` is defined."""
        return False

    def next_logits(self, net: Forward, batch: Batch) -> Tensor:
        """Logits [B, L, V] of each token given those to its left, as a left-to-right model has them."""
        raise ValueError(f"{self.name} does not predict each token of a text from those to its left")

    def with_alpha_0(self: S, alpha_0: float) -> S:
        """The same system evaluated at another alpha_0."""
        raise ValueError(f"alpha_0 is {alpha_0}, but {self.name} has no alpha_0: leave it out")

    @property
    def exact_passes(self) -> int:
        """Network calls of `exact_nats`."""
        return 1

    def exact_nats(self, net: Forward, batch: Batch) -> Tensor:
        """-log p of the scored tokens of each text, [B], where `terms` is a bound and all orders can be enumerated."""
        advice = "use the estimator jackknife" if self.any_order else "use the estimator nelbo"
        raise ValueError(f"{self.name} has too many orders for an exact likelihood: {advice}")

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        """The bound as an expectation over times and masks, one draw for each row.

        independent: the paper's estimator, with independent times and the NELBO's own weights; otherwise stratified
        and with bounded weights, as `esolm score` computes it.
        """
        raise ValueError(f"{self.name} has no bound over times: its likelihood is not an expectation over masks")


class AnyOrder(System, Protocol):
    """A system with a likelihood of x under an order, p(x | sigma)."""

    @property
    def order_alpha_0(self) -> float:
        """The alpha_0 of the distribution P_L^alpha_0 that orders are drawn from; 0 is left to right only."""
        ...

    def order_nats(self, net: Forward, batch: Batch, sigma: Tensor) -> Tensor:
        """-log p of each scored token given the tokens before it in sigma, [B, L]; zero elsewhere.

        Given tokens come first in sigma, padding comes last.
        """
        ...


def as_any_order(system: System) -> AnyOrder:
    """The system as an any-order one; raises ValueError if it is none."""
    if not system.any_order:
        raise ValueError(f"{system.name} has no likelihood under an order: use the estimator nelbo")
    return cast(AnyOrder, system)


def options_of(system: System) -> dict[str, Any]:
    """The name and the hyperparameters of a system, as JSON holds them."""
    return {"name": system.name, **dataclasses.asdict(system)}  # type: ignore[call-overload]


FROM_DATA = ("mask_id", "bos_id", "eos_id", "vocab_size", "token_counts")
"""Fields of a system that come from the tokenizer or, token_counts, from the data, and are no options."""


def with_ids(system: S, ids: Any) -> S:
    """The system with those of `FROM_DATA` that it has, taken from a tokenizer or a manifest."""
    fields = {f.name for f in dataclasses.fields(system)} & set(FROM_DATA)  # type: ignore[arg-type]
    return dataclasses.replace(system, **{name: getattr(ids, name) for name in fields})  # type: ignore[type-var]


def completed(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A stored tree whose key `system` holds options, with the options that its system has got since then.

    They have their defaults, and ids the values of the current tree: those depend on the data alone.
    """
    old, new = stored.get("system", {}), current.get("system", {})
    if not old or old.get("name") != new.get("name"):
        return dict(stored)
    fields = {f.name: f.default for f in dataclasses.fields(find(new["name"]))}
    added = {name: new.get(name) if name in FROM_DATA else fields[name] for name in fields.keys() - old.keys()}
    return {**stored, "system": {**old, **{name: added[name] for name in added.keys() & new.keys()}}}


def names() -> list[str]:
    """The systems of the package, by module name."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def name_of(cls: type) -> str:
    """The name by which `find` returns this class."""
    module = cls.__module__
    short = module.removeprefix(f"{__name__}.")
    return f"{module}.{cls.__qualname__}" if short == module else short


def find(name: str) -> type[Any]:
    """The class of a system: the name of a module of `esolm.systems`, or `package.module.Class` elsewhere."""
    if name in names():
        return _system_in(importlib.import_module(f"{__name__}.{name}"))
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"no system {name!r}: choose one of {', '.join(names())}, or give package.module.Class")
    try:
        found = getattr(_import(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no system {name!r}: {error}") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and System in found.__mro__):
        raise ValueError(f"system {name!r} must be a dataclass that subclasses esolm.systems.System")
    return found


def _import(module: str) -> ModuleType:
    """Import a module; if it is not found, also look in the working directory, which may not be on the path."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if here in sys.path or not f"{module}.".startswith(f"{error.name}."):
            raise
        sys.path.append(here)
        importlib.invalidate_caches()
        return importlib.import_module(module)


def _system_in(module: ModuleType) -> type[Any]:
    """The one system that a module of the package defines."""
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    (found,) = (value for value in own if isinstance(value, type) and System in value.__mro__)
    return found
