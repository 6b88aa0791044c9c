"""The network as a model of transformers: import this module, and the Auto classes know `esolm`.

The logits at a position are about the token at that position, in every system. Given labels, the loss is the system's
own: it draws its own noise, so inputs stay clean (a collator with mlm=False), and Trainer's seed decides the noise.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import MaskedLMOutput
except ImportError as error:
    raise ImportError("esolm.hf needs transformers: pip install 'esolm[hf]'") from error

from ..core import order
from ..core.randomness import Randomness, fold
from ..core.terms import total
from ..core.visibility import HIDDEN, Visibility, block, causal, full, hide, prefix
from ..likelihood.orders import name_of
from ..model import LanguageModel
from ..net.denoiser import Denoiser, DenoiserConfig, Rows
from ..net.protocol import trainable
from ..storage import folder

IGNORED = -100
"""The label of a token that is given."""


class EsoLMConfig(PretrainedConfig):
    """`net`: the fields of DenoiserConfig; `system`: its name and fields; `about`: where the model comes from."""

    model_type = folder.TYPE

    def __init__(
        self,
        net: dict[str, Any] | None = None,
        system: dict[str, Any] | None = None,
        about: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.net, self.system, self.about = dict(net or {}), dict(system or {}), dict(about or {})
        more.pop("vocab_size", None)
        self.vocab_size = self.net.get("vocab_size")
        super().__init__(**more)


class EsoLMForMaskedLM(PreTrainedModel):
    """A Denoiser and its system."""

    config_class = EsoLMConfig
    base_model_prefix = "net"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    def __init__(self, config: EsoLMConfig) -> None:
        super().__init__(config)
        self.net = Denoiser(DenoiserConfig(**config.net))
        options = dict(config.system)
        self.system = folder.trusted(options.pop("name"))(**options)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the network starts with its own first weights."""

    def _set_gradient_checkpointing(self, *given: Any, enable: bool = True, **more: Any) -> None:
        self.net.checkpoint_blocks = enable

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.net.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.net.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sigma: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Logits [B, L, V] of partly masked texts or, with labels, the system's loss of whole texts, in nats per token.

        labels: the tokens to learn, -100 where a token is given. sigma: for Eso-LM, the order in which tokens see each
        other; by default those that are not masked and then the masks, both ascending.
        """
        valid = None if attention_mask is None or attention_mask.bool().all() else attention_mask.bool()
        found: dict[str, Any] = {}
        if labels is None:
            found["logits"] = logits(self.net, self.system, input_ids, valid, sigma)
        else:
            found["loss"] = self._loss(input_ids, labels, valid)
        output = MaskedLMOutput(**found)
        return output if return_dict is None or return_dict else output.to_tuple()

    def _loss(self, input_ids: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
        given = labels == IGNORED
        x = torch.where(given, input_ids, labels)
        seen = x if valid is None else torch.where(valid, x, -1)
        if (seen == self.system.mask_id).any():
            raise ValueError("a text to learn holds masks: esolm draws its own, so use a collator with mlm=False")
        scored = ~given if valid is None else ~given & valid
        seed = int(torch.randint(1 << 62, ())) if self.training else 0
        rng = Randomness(fold(seed, "trainer"), 0, len(x))
        terms = self.system.terms(self.net, x, valid, given if given.any() else None, rng, self.training)
        counts = {term.name: int(term.valid.sum()) for term in terms}
        return total(terms, self.system.counts(scored, rng) if self.training else counts)


AutoConfig.register(folder.TYPE, EsoLMConfig, exist_ok=True)
AutoModel.register(EsoLMConfig, EsoLMForMaskedLM, exist_ok=True)
AutoModelForMaskedLM.register(EsoLMConfig, EsoLMForMaskedLM, exist_ok=True)


def wrap(lm: LanguageModel, about: dict[str, Any] | None = None) -> EsoLMForMaskedLM:
    """A model of esolm as one of transformers, with weights of its own."""
    model: Any = EsoLMForMaskedLM(EsoLMConfig(**folder.describe(lm.net.config, lm.system), about=about))
    model.net.load_state_dict(trainable(lm.net).state_dict())
    return model.to(lm.net.device).eval()


def logits(net: Denoiser, system: Any, x: Tensor, valid: Tensor | None = None, sigma: Tensor | None = None) -> Tensor:
    """What the network says of every position in the pattern that its system samples with, [B, L, V].

    x: int [B, L], the mask id where a token is not known. sigma: see `EsoLMForMaskedLM.forward`.
    """
    length, name = x.shape[1], name_of(system)
    if sigma is not None and name != "esolm":
        raise ValueError(f"sigma is an order for esolm; {name} has none: leave it out")
    position = torch.arange(length, device=x.device)[None]
    if name == "mdlm":
        return net(x, position, full(length, valid, x.device))
    if name == "bd3lm":
        if length % system.block_size:
            raise ValueError(f"length {length} is not a multiple of block_size {system.block_size}")
        visibility = block(length, system.block_size, x.device)
        visibility = visibility if valid is None else hide(visibility, valid.repeat(1, 2))
        return net(x.repeat(1, 2), position.repeat(1, 2), visibility, out=Rows(slice(0, length)))
    masked = x == system.mask_id
    if name == "esolm":
        if sigma is None:
            sigma = order.sort(order.groups(masked, valid, None), position / length)
        unknown = masked if valid is None else masked | ~valid
        visibility = _in_order(system, unknown.gather(1, sigma))
        return _placed(net(x.gather(1, sigma), sigma, visibility), sigma)
    if name == "ar":
        masked = torch.zeros_like(masked)  # what is not known comes after all that is, whatever stands there
        sigma = order.sort(order.groups(masked, valid, None), position / length)
        before = torch.cat([x.new_full((len(x), 1), system.start_id), x.gather(1, sigma)[:, :-1]], 1)
        return _placed(net(before, sigma, causal(length, x.device)), sigma)
    raise ValueError(f"system {name!r} has no pattern for logits: it must be ar, mdlm, bd3lm or esolm")


def _in_order(system: Any, masked: Tensor) -> Visibility:
    """Eso-LM's pattern on sorted tokens, masks and padding last: B, B whose masks do not see each other, or A."""
    visibility = causal(masked.shape[1], masked.device)
    num_clean = (~masked).sum(1)
    if system.variant == "A":
        return prefix(visibility.rank, num_clean)
    if system.loss != "any_order":
        return visibility
    place = visibility.rank.expand_as(masked)
    rank = torch.where(masked, HIDDEN, place)
    horizon = torch.where(masked, num_clean[:, None] - 1, place)
    return Visibility(rank, horizon, torch.where(masked, place, -1))


def _placed(found: Tensor, sigma: Tensor) -> Tensor:
    """Logits in the order of sigma, [B, L, V], back at their positions."""
    return torch.empty_like(found).scatter_(1, sigma[..., None].expand_as(found), found)
