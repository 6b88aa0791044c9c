"""The bodies of HTTP requests, checked field by field; unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

try:
    from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator
except ImportError as error:
    raise ImportError("esolm.serving.bodies needs pydantic: pip install 'esolm[serve]'") from error

from ..sampling.options import SamplingOptions

MOST_STOPS = 4
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
TokenIds = list[StrictInt]


class ErrorDetail(BaseModel):
    """What was wrong, and in which field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Every error, in OpenAI's form."""

    error: ErrorDetail


class SamplingBody(BaseModel):
    """What every request for samples may say: OpenAI's names, and the library's sampling options beside them."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    n: Annotated[StrictInt, Field(ge=1)] = 1
    seed: Seed | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    stream_positions: StrictBool | None = None
    user: StrictStr | None = None
    sampler: StrictStr | None = None
    alpha_0: Annotated[Number, Field(ge=0, le=1)] | None = None
    num_steps: Annotated[StrictInt, Field(ge=1, le=2**20)] | None = None
    parallelism: Annotated[StrictInt, Field(ge=1, le=2**20)] | None = None
    window: Annotated[StrictInt, Field(ge=1)] | None = None
    confidence: StrictStr | None = None
    tau: Annotated[Number, Field(ge=0, le=1)] | None = None
    block_length: Annotated[StrictInt, Field(ge=1, le=2**20)] | None = None
    cache: StrictStr | None = None
    order: TokenIds | None = None
    given_order: Literal["ascending", "random"] | None = None
    regex: StrictStr | list[StrictStr | None] | None = None
    json_schema: dict[str, Any] | list[dict[str, Any] | None] | None = None
    match: Literal["generated", "text"] | None = None

    def sampling_options(self, seed: int) -> SamplingOptions:
        """The options as the library takes them; what is left out has its default."""
        fields = SamplingOptions.__dataclass_fields__.keys() & type(self).model_fields.keys() - {"seed"}
        values = {name: getattr(self, name) for name in fields}
        return SamplingOptions(**{name: value for name, value in values.items() if value is not None}, seed=seed)


class StreamOptions(BaseModel):
    """OpenAI's options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class CompletionBody(SamplingBody):
    """/v1/completions."""

    prompt: StrictStr | TokenIds | list[StrictStr] | list[TokenIds] = ""
    suffix: StrictStr | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    stream_options: StreamOptions | None = None
    best_of: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None

    @model_validator(mode="after")
    def _supported(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported: leave it out")
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: leave it out")
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise ValueError(f"stop takes at most {MOST_STOPS} texts, none of them empty")
        return self

    @property
    def stops(self) -> list[str]:
        """The texts at which a completion ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return list(prompt) if several else [prompt]


class FimBody(CompletionBody):
    """/v1/fim/completions, as Mistral has it; `random_seed` is its name of the seed, `min_tokens` is always met."""

    random_seed: Seed | None = None
    min_tokens: StrictInt | None = None


class LlamaInfillBody(SamplingBody):
    """/infill, as llama.cpp's server has it; the sampling parameters it shares with us, and those that change nothing
    here."""

    model_config = ConfigDict(extra="ignore")

    input_prefix: StrictStr = ""
    input_suffix: StrictStr = ""
    prompt: StrictStr = ""
    n_predict: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None


class InfillBody(SamplingBody):
    """/v1/infill: a text with blanks, or token ids with nulls."""

    text: StrictStr | None = None
    blank: Annotated[StrictStr, Field(min_length=1)] = "____"
    tokens_per_blank: StrictInt | StrictStr | list[StrictInt | StrictStr] = 8
    length_prior: list[Number] | None = None
    length_choice: Literal["draw", "best"] = "draw"
    tokens: list[StrictInt | None] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> InfillBody:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text, with blanks, or tokens, with null where a token is to be drawn")
        return self


class ScoreBody(BaseModel):
    """/v1/score."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    text: StrictStr | list[StrictStr] | None = None
    tokens: list[TokenIds] | None = None
    context: StrictStr | None = None
    given: list[StrictInt] | list[list[StrictInt]] | None = None
    alpha_0: Annotated[Number, Field(ge=0, le=1)] | None = None
    estimator: Literal["iw", "jackknife"] = "iw"
    num_orders: Annotated[StrictInt, Field(ge=1)] = 16
    antithetic: StrictBool = False
    given_order: Literal["ascending", "random"] = "ascending"
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_of_two(self) -> ScoreBody:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self


class TokenizeBody(BaseModel):
    """/tokenize. `content` is llama.cpp's name, `prompt` vLLM's."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    content: StrictStr | None = None
    prompt: StrictStr | None = None
    with_pieces: StrictBool = False


class DetokenizeBody(BaseModel):
    """/detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    tokens: TokenIds
    with_pieces: StrictBool = False
