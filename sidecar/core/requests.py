"""What a client asks for, in our own words. Frozen: a change is a new object."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Json = Mapping[str, Any]
Detail = Literal["low", "high"]
# Begins what stands for an image in a text; followed by letters that name its content.
IMAGE_MARK = "zqimage"


@dataclass(frozen=True, slots=True)
class Image:
    """
    An image as a client sent it.

    Args:
        source: a data URL, or where it is fetched from (http or https).
        detail: how closely it is to be looked at.
        path: where it stands in the request, e.g. `messages[2].content[1]`.
        mark: the text that stands for it, once its content is known.
        is_file: it is a file of another kind (a PDF), which no model here reads;
            `source` is the beginning of what was sent.
    """

    source: str = field(repr=False)
    detail: Detail = "high"
    path: str = ""
    mark: str = "[image]"
    is_file: bool = False

    def marked(self, mark: str) -> "Image":
        """The same, its content known by a mark; what it came as is not needed more."""
        return replace(self, source="", mark=mark)


Part = str | Image


def text_of(part: Part) -> str:
    """A part as text: of an image, its mark."""
    return part.mark if isinstance(part, Image) else part


def join_parts(parts: Iterable[Part]) -> str:
    """
    Join parts with a newline, unless one already stands at the seam.

    Beside an image none is put: templates print what is around it as it is.
    """
    joined: list[str] = []
    is_behind_image = False
    for part in parts:
        text = text_of(part)
        if not text:
            continue
        is_image = isinstance(part, Image)
        is_seam = bool(joined) and not (is_image or is_behind_image)
        if is_seam and not joined[-1].endswith("\n") and not text.startswith("\n"):
            joined.append("\n")
        joined.append(text)
        is_behind_image = is_image
    return "".join(joined)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in an assistant turn; `arguments` is JSON text as the wire has it."""

    id: str
    name: str
    arguments: str


def call_key(call_id: str) -> str:
    """A call id as clients return it: some drop the underscore."""
    return call_id.replace("_", "")


@dataclass(frozen=True, slots=True)
class Tool:
    """
    One offered function; `raw` is its OpenAI form, which chat templates print.

    Args:
        is_custom: its client takes calls as one bare text, not as arguments.
        is_deferred: it is defined in a message, and not among the other tools.
        is_held: its client wants to see no call of it before that is complete.
        strict_param: the field that asks for arguments of its schema alone; "": none.
    """

    name: str
    parameters: Json
    raw: Json
    is_custom: bool = False
    is_deferred: bool = False
    is_held: bool = False
    strict_param: str = ""

    @property
    def is_sent_whole(self) -> bool:
        """Whether no piece of a call's arguments is sent before the last one."""
        return self.is_held or self.is_custom


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of thinking as a client sends it back, with its token if it kept one."""

    text: str
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """
    One message of the conversation.

    Args:
        parts: texts and images in order; how a client cut its text is not content.
        reasoning: thinking the client echoed beside the text, None if it sent none.
        thoughts: the same piece by piece, where the wire format has tokens for them.
        tool_call_id: which call a `tool` message answers.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    thoughts: tuple[Thought, ...] = ()

    @property
    def text(self) -> str:
        """The parts as one text, each image as its mark."""
        return join_parts(self.parts)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images among the parts."""
        return tuple(part for part in self.parts if isinstance(part, Image))


@dataclass(frozen=True, slots=True)
class Thinking:
    """
    Whether the model shall reason, and who said so.

    Args:
        enabled: None if no source in the request decided.
        source: the field that decided, e.g. `extra_body.reasoning.effort`.
        raw: the value found there.
        effort: the effort word, for templates that take one.
        is_shown: whether the client is sent the thinking's text, or its token alone.
        budget: most tokens of it; None: as many as there are.
    """

    enabled: bool | None = None
    source: str | None = None
    raw: Any = None
    effort: str | None = None
    is_shown: bool = True
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """
    How the next token is chosen; None takes the model's or the server's default.

    Ranges are checked where the request is read (dialects/generation_fields).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What applies to a chat and to a raw completion alike."""

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None  # None: no logprobs; 0: the sampled token's only
    max_ttft_s: float | None = None  # refuse rather than begin later
    wants_progress: bool = False  # to be sent how far the prefill is
    adapter: str = ""  # the name of one that the answer is made with
    wants_metrics: bool = False  # to be sent what it took
    prediction: str = ""  # what the client expects of the answer; it is drafted from it
    context_len: int | None = None  # tokens kept of its context, which then rotates


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """
    `mode` none, auto, required, or named (then `name`).

    Args:
        is_single: at most one call is made.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """
    What the text of an answer must be; thinking and calls of tools are free.

    Args:
        kind: `json_schema`: JSON that a schema allows; `json_object`: any object;
            `choice`: one of some texts; `regex`: what a pattern matches as a whole;
            `grammar`: what a grammar in Lark derives.
        value: the schema, texts, pattern or grammar; None for `json_object`.
        is_strict: refused where the schema cannot be kept to in all it says.
        param: the field that asks for it.
    """

    kind: Literal["json_schema", "json_object", "choice", "regex", "grammar"]
    value: Any = None
    is_strict: bool = True
    param: str = ""


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """
    Who asks, as far as the request says; for logs, sessions and scopes.

    These are kept for as long as what was computed for them: a session or key id
    longer than 256 characters is kept as its hash, a program's name cut there.

    Args:
        sender: a name for the key that the request itself came with; of what comes
            through LiteLLM that is LiteLLM's, and `api_key_id` its client's.
        is_key_checked: LiteLLM knows the client's key: it is not made up.
        is_batch: the request comes from a batch, which nobody waits for.
        address: where the request came from, which may be LiteLLM; "": a program's own.
        session_source: the field that named the session, e.g. `metadata.thread_id`.
        parents, branch: what the client says of the session's place among others.
        parent_sources, branch_source: the fields that named those.
        thread: the client's name for a conversation within the session that is not its
            first one, such as a sub-agent's.
    """

    session: str | None = None
    user_agent: str | None = None
    api_key_id: str | None = None
    session_source: str | None = None
    parents: tuple[str, ...] = ()
    branch: str | None = None
    parent_sources: tuple[str, ...] = ()
    branch_source: str | None = None
    sender: str | None = None
    is_key_checked: bool = False
    is_batch: bool = False
    address: str = ""
    thread: str | None = None

    def with_key(
        self, key_id: str | None, address: str = "", *, is_batch: bool = False
    ) -> "ClientInfo":
        """The same, come with a key, unless the plugin has named one."""
        own = self.api_key_id or key_id
        return replace(
            self, api_key_id=own, sender=key_id, is_batch=is_batch, address=address
        )

    @property
    def limited_as(self) -> str:
        """
        Whose rate limits its requests count for; "": nobody's.

        A key that nobody has checked may be another one each time: it does not count.
        """
        if self.is_batch:  # it waits for everybody else as it is
            return ""
        return (self.is_key_checked and self.api_key_id) or self.address

    def with_session(self, named: Mapping[str, Any]) -> "ClientInfo":
        """The same, its session the first name that is a text, by where it stood."""
        for source, name in named.items():
            if isinstance(name, str) and name:
                return replace(self, session=name, session_source=source)
        return self

    def __post_init__(self) -> None:
        """Bound what a client may have kept."""
        object.__setattr__(self, "session", short_id(self.session))
        object.__setattr__(self, "api_key_id", short_id(self.api_key_id))
        object.__setattr__(self, "branch", short_id(self.branch))
        object.__setattr__(self, "thread", short_id(self.thread))
        parents = tuple(short_id(name) or "" for name in self.parents)
        object.__setattr__(self, "parents", parents)
        if self.user_agent is not None:
            agent = self.user_agent[:_MAX_ID_CHARS]
            object.__setattr__(self, "user_agent", agent)


_MAX_ID_CHARS = 256


def short_id(name: str | None) -> str | None:
    """A client's name for something; its hash if it is longer than 256 characters."""
    if name is None or len(name) <= _MAX_ID_CHARS:
        return name
    return "sha256:" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


_MAX_NAMES = 32
_MAX_NAME_CHARS = 80
_ODD = re.compile(r"[^A-Za-z0-9_.=\[\]/-]")


def join_names(names: Sequence[str]) -> str:
    """The names in one line; a client wrote them, so nothing odd and not too many."""
    shown = [_ODD.sub("?", name)[:_MAX_NAME_CHARS] for name in names[:_MAX_NAMES]]
    more = len(names) - _MAX_NAMES
    return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """
    One chat request, checked.

    Args:
        path: where it was sent. is_streamed: its answer is written as it comes.
        ignored: what it asks for that has no effect here; the answer names it.
        answer_id: what the client will know the answer by, if it is streamed.
        begun: the beginning of the answer, which the model is to go on with.
    """

    request_id: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat | None = None
    thinking: Thinking = Thinking()
    template_kwargs: Json = field(default_factory=dict)
    options: GenerationOptions = GenerationOptions()
    client: ClientInfo = ClientInfo()
    path: str = ""
    is_streamed: bool = False
    ignored: tuple[str, ...] = ()
    answer_id: str = ""
    begun: Message | None = None

    @property
    def needs_constraint(self) -> bool:
        """
        Whether tokens must be forbidden or forced in its answer.

        By a form, a call that must come, at most one call, none, a thinking budget.
        """
        is_call = self.tool_choice.mode in ("required", "named")
        is_short = self.thinking.budget is not None or self.tool_choice.is_single
        is_form = self.output_format is not None or bool(self.strict_params)
        return is_call or is_short or is_form or self.calls_nothing

    @property
    def strict_params(self) -> tuple[str, ...]:
        """The fields that ask for arguments of a tool's schema alone."""
        named = (tool.strict_param for tool in self.tools)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def begun_text(self) -> str:
        """What its answer begins with; "" if nothing is begun."""
        return "" if self.begun is None else self.begun.text

    @property
    def calls_nothing(self) -> bool:
        """Whether tools are shown to the model that it must not call."""
        return self.tool_choice.mode == "none" and bool(self.tools)

    def sent(
        self, path: str, key_id: str | None, address: str, *, is_batch: bool = False
    ) -> "ChatRequest":
        """The same request, known to come to a path, with a key and from an address."""
        client = self.client.with_key(key_id, address, is_batch=is_batch)
        return replace(self, path=path, client=client)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """
    One raw completion: the prompt goes to the model as it is, no template.

    Args:
        ignored: what it asks for that has no effect here; the answer names it.
    """

    request_id: str
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False
    options: GenerationOptions = GenerationOptions()
    client: ClientInfo = ClientInfo()
    answer_id: str = ""
    ignored: tuple[str, ...] = ()

    def from_key(
        self, key_id: str | None, address: str, *, is_batch: bool = False
    ) -> "CompletionRequest":
        """The same request, known to come with a key and from an address."""
        client = self.client.with_key(key_id, address, is_batch=is_batch)
        return replace(self, client=client)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """
    Texts that are to have a vector each.

    Args:
        inputs: texts, or token ids. dimensions: of a vector; None: all it has.
        as_base64: vectors as float32 in base64, else as numbers.
        truncates: cut what is too long, else refuse it.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    as_base64: bool = False
    truncates: bool = False


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """
    Documents that are to be ordered by how well each answers a query.

    Args:
        top_n: of how many the score is wanted; None: of all.
        instruction: what is looked for, for models that take one.
        with_documents: send them back.
    """

    model: str
    query: str
    documents: tuple[str, ...]
    top_n: int | None = None
    instruction: str | None = None
    with_documents: bool = False
