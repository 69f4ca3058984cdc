"""What the native routes ask for beside chats, and what comes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.requests import (
    ChatRequest,
    ClientInfo,
    CompletionRequest,
    SamplingParams,
    ToolCall,
)

# A text, token ids, or a conversation that the model's template prints.
Prompt = str | tuple[int, ...] | ChatRequest


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """
    Prompts whose next token is wanted, or how likely each of some labels is.

    Args:
        with_logits: send those of the whole vocabulary as well.
    """

    model: str
    prompts: tuple[Prompt, ...]
    labels: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    with_logits: bool = False
    client: ClientInfo = ClientInfo()


@dataclass(frozen=True, slots=True)
class Classified:
    """
    One prompt's next token.

    Args:
        label: the likeliest; None: no labels were given. scores: of each label.
        error: why there is nothing; "": there is.
    """

    token_id: int = 0
    text: str = ""
    label: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    logits: tuple[float, ...] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """
    Prompts that are each answered as a request of its own.

    Args:
        first: what holds for each, with a prompt that is none of them.
        readers: make a prompt's request; each raises BadRequest or ValidationFailed. A
            prompt is not read before its turn, whoever has left by then.
    """

    first: ChatRequest | CompletionRequest
    readers: tuple[Callable[[], ChatRequest | CompletionRequest], ...]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """
    What was said to one prompt of a batch.

    Args:
        error: why there is nothing, or no more; "": nothing went wrong.
        rotated_field: says that its context has forgotten its middle, if it has.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    error: str = ""
    rotated_field: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """
    A prompt whose keys are wanted.

    Args:
        layers: of these alone; None: of all. as_arrays: as an npz file, else in JSON.
    """

    model: str
    prompt: Prompt
    layers: tuple[int, ...] | None = None
    as_arrays: bool = False
    client: ClientInfo = ClientInfo()


@dataclass(frozen=True, slots=True)
class LoraJob:
    """
    How an adapter is trained.

    Args:
        keys: projections that are wrapped, by the ends of their paths.
        alpha: mlx-lm's scale is alpha / rank.
        init: of A: `kaiming_normal`, or `uniform` as mlx-lm does; B is zero.
        num_layers: of the last blocks; -1: all.
        mask_prompt: the loss counts in answers alone.
        iters: batches; weights change at each `grad_accumulation` of them.
        exclusive: requests are refused until it has ended.
    """

    keys: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj")
    rank: int = 8
    alpha: float = 160.0
    init: str = "kaiming_normal"
    dtype: str = "float32"
    num_layers: int = 16
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    grad_checkpoint: bool = False
    grad_accumulation: int = 1
    mask_prompt: bool = False
    batch_size: int = 4
    iters: int = 100
    max_seq_length: int = 2048
    seed: int = 0
    exclusive: bool = False

    @property
    def lora_parameters(self) -> dict[str, Any]:
        """As mlx-lm knows them."""
        scale = self.alpha / self.rank
        keys = list(self.keys)
        return {"rank": self.rank, "scale": scale, "dropout": 0.0, "keys": keys}


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """
    An adapter that is to be trained.

    Args:
        name: under which it is served afterwards. rows: what it learns from.
    """

    model: str
    name: str
    rows: tuple[Mapping[str, Any], ...]
    job: LoraJob


@dataclass(frozen=True, slots=True)
class AskedLimits:
    """Limits of the device's memory in bytes; None: as it is."""

    cache_limit: int | None = None
    memory_limit: int | None = None
    wired_limit: int | None = None
