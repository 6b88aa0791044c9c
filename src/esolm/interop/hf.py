"""A transformers model for every system. Importing this module registers it with the Auto classes.

The logits at a position predict the token at that position, in every system. With labels, the model returns the
system's own loss. The system draws the noise itself from torch's seed, so inputs must be clean (a collator with
mlm=False).

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
    raise ImportError("esolm.interop.hf needs transformers: pip install 'esolm[hf]'") from error

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..core.terms import total
from ..model import LanguageModel
from ..net.denoiser import Denoiser, DenoiserConfig
from ..net.protocol import trainable
from ..storage import folder

IGNORED = -100
"""The label of tokens that are given or padding."""


class EsoLMConfig(PretrainedConfig):
    """net: the fields of `DenoiserConfig`. system: its name and fields. about: where the model comes from."""

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
    """A `Denoiser` and its system."""

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
        """Do nothing: the network initialises itself."""

    def _set_gradient_checkpointing(self, *given: Any, enable: bool = True, **more: Any) -> None:
        self.net.checkpoint_blocks = enable

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding of tokens."""
        return self.net.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        """The output layer."""
        return self.net.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sigma: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Logits [B, L, V] of partly masked texts or, with labels, the system's loss on clean texts in nats per token.

        labels: the tokens to learn, and -100 for tokens that are given. Padding has attention_mask 0, or label -100
        and the mask token. sigma: for any-order systems, the order in which tokens see each other; by default the known
        tokens and then the masks, both ascending.
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
        real = ~given | (x != self.system.mask_id)  # a mask without a label is padding
        valid = real if valid is None else real & valid
        if (valid & (x == self.system.mask_id)).any():
            raise ValueError("labels contain the mask token: the system draws masks itself, so use mlm=False")
        batch = Batch(x, valid, given & valid).trimmed()
        seed = int(torch.randint(1 << 62, ())) if self.training else 0
        rng = Randomness(fold(seed, "trainer"), 0, len(x))
        terms = self.system.terms(self.net, batch, rng, self.training)
        counts = {term.name: int(term.valid.sum()) for term in terms}
        return total(terms, self.system.counts(batch.scored, rng) if self.training else counts)


AutoConfig.register(folder.TYPE, EsoLMConfig, exist_ok=True)
AutoModel.register(EsoLMConfig, EsoLMForMaskedLM, exist_ok=True)
AutoModelForMaskedLM.register(EsoLMConfig, EsoLMForMaskedLM, exist_ok=True)


def wrap(lm: LanguageModel, about: dict[str, Any] | None = None) -> EsoLMForMaskedLM:
    """A copy of a model as a transformers model."""
    model: Any = EsoLMForMaskedLM(EsoLMConfig(**folder.describe(lm.net.config, lm.system), about=about))
    model.net.load_state_dict(trainable(lm.net).state_dict())
    return model.to(lm.net.device).eval()
