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

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..core.terms import total
from ..model import LanguageModel
from ..net.denoiser import Denoiser, DenoiserConfig
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
            found["logits"] = self.system.logits(self.net, Batch(input_ids, valid), sigma)
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
        batch = Batch(x, valid, given).trimmed()
        seed = int(torch.randint(1 << 62, ())) if self.training else 0
        rng = Randomness(fold(seed, "trainer"), 0, len(x))
        terms = self.system.terms(self.net, batch, rng, self.training)
        counts = {term.name: int(term.valid.sum()) for term in terms}
        return total(terms, self.system.counts(batch.scored, rng) if self.training else counts)


AutoConfig.register(folder.TYPE, EsoLMConfig, exist_ok=True)
AutoModel.register(EsoLMConfig, EsoLMForMaskedLM, exist_ok=True)
AutoModelForMaskedLM.register(EsoLMConfig, EsoLMForMaskedLM, exist_ok=True)


def wrap(lm: LanguageModel, about: dict[str, Any] | None = None) -> EsoLMForMaskedLM:
    """A model of esolm as one of transformers, with weights of its own."""
    model: Any = EsoLMForMaskedLM(EsoLMConfig(**folder.describe(lm.net.config, lm.system), about=about))
    model.net.load_state_dict(trainable(lm.net).state_dict())
    return model.to(lm.net.device).eval()
