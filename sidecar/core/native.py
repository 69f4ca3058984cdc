"""What the native routes ask for beside chats, and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """Prompts that are each answered as a request of its own."""

    requests: tuple[ChatRequest | CompletionRequest, ...]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """
    What was said to one prompt of a batch.

    Args:
        error: why there is nothing, or no more; "": nothing went wrong.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    error: str = ""


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
