"""
The whole input side: messages -> what the model reads.

heal -> find volatile spans -> render, once plain and once with marks -> canonical ids
-> closest prompts before -> pin -> splice -> model ids (docs/reuse.md s3).
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.conversation import IMPLICIT, Conversation, is_implicit
from sidecar.core.errors import BadRequest, ContextLengthExceeded, RequestCancelled
from sidecar.core.prompt import (
    CacheReport,
    ChatTokenizer,
    Hit,
    Lookup,
    ModelIds,
    ModelPrompt,
    SeenImage,
)
from sidecar.core.requests import ChatRequest, Message
from sidecar.infra.metrics import Counters
from sidecar.memory import session_turn_store
from sidecar.memory.conversation_memory import (
    ConversationMemory,
    GenerationPrefix,
    PendingTurn,
    new_turn,
)
from sidecar.memory.healing_store import Continued
from sidecar.memory.lineage import LineageRecord, pack
from sidecar.pipeline.reuse.drift_report import DriftReport
from sidecar.pipeline.reuse.healed_history import HealedHistory, heal
from sidecar.pipeline.reuse.prompt_ids import (
    canonical_ids,
    check_length,
    end_of_message,
    rank_boundaries,
    says_its_text,
)
from sidecar.pipeline.reuse.prompt_variants import (
    COUNTED,
    ReuseChooser,
    ReuseDecision,
    ReuseQuery,
    counted,
    make_report,
)
from sidecar.pipeline.template.chat_template import (
    ChatTemplate,
    WriteCall,
    defined_tools,
    in_order_of_calls,
    state_choice,
)
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.pipeline.template.image_slots import place_images
from sidecar.pipeline.template.marked_render import Layout, lay_out
from sidecar.pipeline.template.turn_delimiters import (
    TurnDelimiters,
    TurnDelimitersCache,
)
from sidecar.pipeline.template.written_contents import omit_written
from sidecar.volatile import spans
from sidecar.volatile.marked_message import Span
from sidecar.volatile.rules import RuleSet

_NAMED = "named "  # before what a client calls as sessions without a name are called
_TAKEN = re.compile(f"(?:{_NAMED})*{IMPLICIT}")


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """
    The pipeline's part of the configuration, and of what is known of the model.

    Args:
        media_tokens: what stands for images in prompts; typed, they are text.
        write_call: see ChatTemplate.
        holds_calls: whether a grammar holds an answer to the calls that it must be.
        keeps_from_calls: whether an answer that must call nothing is kept from it; else
            such a request's tools are not defined.
        omits_written: whether past calls of a tool `write` show a digest of what they
            wrote.
    """

    default_thinking: bool
    preserve_thinking: bool
    canonicalize: bool
    pinning: bool
    splicing: bool
    min_gain: int
    verify: bool = False
    media_tokens: frozenset[str] = frozenset()
    holds_calls: bool = False
    write_call: WriteCall | None = None
    keeps_from_calls: bool = False
    omits_written: bool = False


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """
    A chat request as the model reads it.

    Args:
        model: what the engine is given. text: its ids as text.
        thinking: whether the model was asked to reason; opens_thinking: the prompt ends
            in an open think block.
        hit: what is held of it as KV.
        report: what was done to reuse KV.
        counted: the counters that it moved, and by how much.
        pending_turn: what is remembered of it if its answer ends cleanly.
    """

    model: ModelPrompt
    text: str
    opens_thinking: bool
    thinking: bool
    hit: Hit
    report: CacheReport
    counted: Mapping[str, int]
    pending_turn: PendingTurn
    unseen: tuple[str, ...] = ()  # where images stood that are replaced by words

    @property
    def model_ids(self) -> ModelIds:
        """What the model reads."""
        return self.model.ids

    def with_hit(self, hit: Hit) -> "PreparedPrompt":
        """The same prompt, of which this is held by now."""
        report = replace(self.report, reused_len=hit.cached_len)
        return replace(self, hit=hit, report=report)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them are stored."""
        return self.num_tokens, self.hit.cached_len

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.model.ids)


@dataclass(frozen=True, slots=True)
class _Reading:
    """
    A request on its way to a prompt.

    Args:
        delimiters: what stands around turns; None: none is put back.
        check: raises if nobody waits for the answer any more.
    """

    request: ChatRequest
    salt: str
    thinking: bool
    kwargs: Mapping[str, Any]
    delimiters: TurnDelimiters | None
    generation: int
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a conversation's next request is compared by: its messages, its tools."""

    digests: tuple[str, ...]
    tools: session_turn_store.ToolNames


class Pipeline:
    """
    The input side of one loaded model. Any thread.

    Args:
        lookup: what is held as KV of a form of a prompt.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        think_open: str,
        ruleset: RuleSet,
        settings: PipelineSettings,
        memory: ConversationMemory,
        lookup: Lookup,
    ) -> None:
        self.template = ChatTemplate(tokenizer, settings.write_call)
        self.encoder = PromptEncoder(tokenizer, settings.media_tokens)
        self.memory = memory
        self.drift = DriftReport()
        self.counters = Counters(COUNTED)
        self._tokenizer = tokenizer
        self._lookup = lookup
        self._think_open = think_open
        self._ruleset = ruleset
        self._settings = settings
        self._keeps_thinking = (
            settings.preserve_thinking and self.template.traits.preserve_thinking
        )
        added = tokenizer.get_added_vocab()
        self._media_ids = {added[t] for t in settings.media_tokens if t in added}
        self._delimiters = TurnDelimitersCache(self.template, self.encoder)
        self._chooser = ReuseChooser(
            self.encoder,
            memory.lineage,
            ruleset,
            settings.min_gain,
            pinning=settings.pinning,
        )
        memory.also_forget(self.drift.clear)
        memory.also_forget(self.encoder.clear)

    def prepare(
        self,
        request: ChatRequest,
        salt: str = "",
        max_tokens: int = sys.maxsize,
        is_wanted: Callable[[], bool] = lambda: True,
        images: Sequence[SeenImage] = (),
    ) -> PreparedPrompt:
        """
        Find the form of a request that reuses most, and say nothing false in it.

        Args:
            salt: the cache salt under which KV is looked for.
            max_tokens: the longest prompt that can be answered.
            is_wanted: whether the client is still there; asked between messages.
            images: of the request, in order; its messages hold their marks.

        Raises:
            BadRequest: the template refuses the conversation.
            ContextLengthExceeded: it is so much too long that a part tells.
            RequestCancelled: nobody waits for the answer any more.
        """
        request = _with_own_session(request)
        if self._settings.omits_written:
            messages = omit_written(request.messages)
            request = replace(request, messages=messages)
        if self.template.traits.call_ids == "hidden":
            ordered = in_order_of_calls(request.messages)
            request = replace(request, messages=ordered)
        if request.calls_nothing and not self._settings.keeps_from_calls:
            request = replace(request, tools=())
        reading = self._reading(request, salt, is_wanted)
        found = self._healed_history(reading)
        layout = self._lay_out(reading, found, images)
        try:
            check_length(layout.elements, self.encoder, max_tokens)
        except ContextLengthExceeded:
            self._note_sent(reading, found, layout)
            raise
        question = self._question(reading, found, layout)
        reading.check()
        self.memory.lineage.note_sent(question.conversation, question.sent_answered)
        answer, is_false = self._choose(question, max_tokens)
        report, sent = self._report(reading.request, question, answer, found)
        moved = counted(report, answer, num_healed=len(found.healed))
        moved |= {"invariant_violation": 1} if is_false else {}
        self.counters.add_all(moved)
        return PreparedPrompt(
            self._model_prompt(question, answer, found),
            answer.text,
            opens_thinking=self._opens_thinking(answer.text),
            thinking=reading.thinking,
            hit=answer.hit,
            report=report,
            counted=moved,
            pending_turn=self._pending_turn(reading, question, answer, found, sent),
        )

    @property
    def can_splice(self) -> bool:
        """Whether this template lets a turn's own ids be put back."""
        kwargs = self._thinking_kwargs(self._settings.default_thinking)
        return self._settings.splicing and self._delimiters.get(kwargs) is not None

    def note_cost(self, prompt: PreparedPrompt, num_prefilled: int) -> None:
        """Count what a divergence cost, for the drift report."""
        place = prompt.report.divergence
        with self.memory.lock:
            if place is None or not self.memory.is_current(prompt.pending_turn):
                return
            self.drift.note(prompt.pending_turn.client.user_agent, place, num_prefilled)
        self.counters.add("resumed_prefill_tokens", num_prefilled)

    def _reading(
        self, request: ChatRequest, salt: str, is_wanted: Callable[[], bool]
    ) -> _Reading:
        thinking = request.thinking.enabled
        if thinking is None:
            thinking = self._settings.default_thinking
        thinking = thinking and request.begun is None
        kwargs = self._template_kwargs(request, thinking)
        delimiters = self._delimiters.get(kwargs) if self._settings.splicing else None
        check = functools.partial(_check_wanted, is_wanted)
        generation = self.memory.generation
        return _Reading(request, salt, thinking, kwargs, delimiters, generation, check)

    def _healed_history(self, reading: _Reading) -> HealedHistory:
        request = reading.request
        to_alter = self._ruleset if self._settings.pinning else None
        to_mark = self._ruleset if self._settings.canonicalize else None
        messages = spans.normalise(
            state_choice(request, is_held=self._settings.holds_calls), to_alter
        )
        rulesets = (to_mark, to_mark and to_alter)
        healing, delimiters = self.memory.healing, reading.delimiters
        read = replace(
            request, messages=tuple(messages), template_kwargs=reading.kwargs
        )
        return heal(healing, read, delimiters, rulesets, reading.check)

    def _lay_out(
        self, reading: _Reading, found: HealedHistory, images: Sequence[SeenImage]
    ) -> Layout:
        tools, begun = defined_tools(reading.request), reading.request.begun

        def render(messages: Sequence[Message]) -> str:
            reading.check()
            if begun is None:
                return self.template.render(messages, tools, reading.kwargs)
            before = self.template.render_up_to_answer(
                messages, begun, tools, reading.kwargs
            )
            self._check_begun(before)
            return before + begun.text

        healed = found.healed
        if self._media_ids:  # which a model may say: put back, it would be an image
            is_free = self._media_ids.isdisjoint
            healed = {i: turn for i, turn in healed.items() if is_free(turn.raw_ids)}
        layout = lay_out(found.marked, healed, reading.delimiters, render)
        if not images:
            return layout
        return replace(layout, elements=place_images(layout.elements, images))

    def _check_begun(self, before: str) -> None:
        """Refuse to go on with an answer that a template puts within its thinking."""
        if self._opens_thinking(before):
            raise BadRequest(
                "the model's chat template begins each answer with its thinking: one "
                "that is begun cannot be gone on with",
                param="messages",
            )

    def _choose(
        self, question: ReuseQuery, max_tokens: int
    ) -> tuple[ReuseDecision, bool]:
        """The answer, and whether a first one was false and is not used."""
        answer = self._chooser.choose(question, self._lookup, max_tokens)
        decode = self._tokenizer.decode
        said = answer.form.assembled
        if self._settings.verify and not says_its_text(said, self.encoder, decode):
            return self._chooser.plain(question, self._lookup), True
        return answer, False

    def _thinking_kwargs(self, thinking: bool) -> dict[str, Any]:
        kept = {"preserve_thinking": True} if self._keeps_thinking else {}
        return {"enable_thinking": thinking, **kept}

    def _template_kwargs(
        self, request: ChatRequest, thinking: bool
    ) -> Mapping[str, Any]:
        kwargs = self._thinking_kwargs(thinking)
        if self.template.traits.reasoning_effort and request.thinking.effort:
            kwargs["reasoning_effort"] = request.thinking.effort
        return {**kwargs, **request.template_kwargs, "enable_thinking": thinking}

    def _question(
        self, reading: _Reading, healed_history: HealedHistory, layout: Layout
    ) -> ReuseQuery:
        marked = healed_history.marked
        roles = [item.message.role for item in marked]
        found = canonical_ids(layout.elements, roles, self.encoder)
        client = reading.request.client
        session = client.session or session_turn_store.implicit_session(found.ids)
        continued = self.memory.healing.continued(marked, client.api_key_id, session)
        own = _own_turns(healed_history, continued)
        return ReuseQuery(
            layout.elements,
            found,
            self._conversation(reading, healed_history, session, continued),
            self._delimiters.header_tokens(reading.delimiters),
            roles,
            first_own=min(own, default=None),
            answered_before=max(healed_history.in_place, default=0),
            is_proved=layout.is_proved,
            earlier_values=healed_history.earlier_values,
            proofs=healed_history.proofs,
        )

    def _note_sent(
        self, reading: _Reading, healed_history: HealedHistory, layout: Layout
    ) -> None:
        """Know what a request sends in answered messages that is refused."""
        client = reading.request.client
        session = client.session or IMPLICIT
        continued = self.memory.healing.continued(
            healed_history.marked, client.api_key_id, session
        )
        answered = max(_own_turns(healed_history, continued), default=0)
        sent = [
            element.key
            for element in layout.elements
            if isinstance(element, Span)
            and element.value
            and element.message < answered
        ]
        conversation = self._conversation(reading, healed_history, session, continued)
        self.memory.lineage.note_sent(conversation, sent)

    def _conversation(
        self,
        reading: _Reading,
        healed_history: HealedHistory,
        session: str,
        continued: Continued | None,
    ) -> Conversation:
        """
        The conversation that a request goes on with, or begins.

        Args:
            session: as the client named it, or as it was made here.
            continued: the one in which calls were made that the request carries.
        """
        client = reading.request.client
        found, resembles = healed_history.conversation, None
        proved_until = healed_history.proved_until
        if continued is not None:
            thread = continued.conversation
            if found == thread:
                proved_until = max(proved_until, continued.last)
            else:
                proved_until = continued.last
        elif client.session is not None:
            name = session_turn_store.thread_name(healed_history.marked, client.thread)
            thread = Conversation(client.api_key_id, session, name)
        elif (
            found is not None
            and is_implicit(found.session)
            and healed_history.proved_until >= 0
        ):
            thread = found
        else:
            thread = session_turn_store.new_chat(client.api_key_id, session)
            resembles = found
        return Conversation(
            thread.tenant,
            thread.session,
            thread.thread,
            resembles=resembles and replace(resembles, resembles=None),
            salt=reading.salt,
            generation=reading.generation,
            is_batch=client.is_batch,
            proved_until=sys.maxsize if client.session is not None else proved_until,
        )

    def _opens_thinking(self, text: str) -> bool:
        return text.rstrip().lower().endswith(self._think_open.lower())

    def _report(
        self,
        request: ChatRequest,
        question: ReuseQuery,
        answer: ReuseDecision,
        found: HealedHistory,
    ) -> tuple[CacheReport, _Sent]:
        """And what the conversation will be compared by."""
        digests = tuple(session_turn_store.message_digests(found.kept))
        tools = session_turn_store.tool_names(request.tools)
        change = self.memory.turns.compare(question.conversation, digests, tools)
        last = None
        if answer.closest is None:
            canonical = pack(question.canonical.ids)
            last = self.memory.lineage.last(canonical, question.conversation)
        report = make_report(
            question, answer, change, self._tokenizer, found.marked, last
        )
        return report, _Sent(digests, tools)

    def _model_prompt(
        self, question: ReuseQuery, answer: ReuseDecision, found: HealedHistory
    ) -> ModelPrompt:
        assembled, turns = answer.form.assembled, self.memory.turns
        length, asked_by = len(assembled.ids), question.conversation
        conversation = replace(
            asked_by,
            is_subagent=turns.is_subagent(asked_by, length),
            own_len=end_of_message(assembled.boundaries, question.first_own),
        )
        return ModelPrompt(
            assembled.ids,
            rank_boundaries(assembled.boundaries, found.marked),
            conversation,
            assembled.images,
        )

    def _pending_turn(
        self,
        reading: _Reading,
        question: ReuseQuery,
        answer: ReuseDecision,
        found: HealedHistory,
        sent: _Sent,
    ) -> PendingTurn:
        form = answer.form
        canonical = pack(question.canonical.ids)
        return PendingTurn(
            LineageRecord(canonical, form.stands, form.notes, question.conversation),
            new_turn(),
            len(answer.ids),
            sent.digests,
            found.context,
            found.values,
            found.vanishing,
            self._opening(reading, found, answer.ids),
            as_sent=form.pins is None or form.pins.is_silent,
            client=reading.request.client,
            ids=answer.ids,
            alike=found.alike,
            behind=found.behind,
            tools=sent.tools,
        )

    def _opening(
        self, reading: _Reading, found: HealedHistory, ids: ModelIds
    ) -> GenerationPrefix | None:
        """What the turn is written behind, if its ids are where they should be."""
        delimiters = reading.delimiters
        if delimiters is None or reading.request.begun is not None:
            return None
        roles = [item.message.role for item in found.marked]
        start = delimiters.start_behind(roles, len(roles))
        if start is None:
            return None
        lead_ids = self._delimiters.lead_ids(start)
        if ids[len(ids) - len(lead_ids) :] != lead_ids:
            return None
        return GenerationPrefix(start.header, start.lead, lead_ids)


def _own_turns(healed_history: HealedHistory, continued: Continued | None) -> list[int]:
    """Indexes of messages that the model wrote in this conversation."""
    return [*healed_history.healed, *([continued.first] if continued else [])]


def _with_own_session(request: ChatRequest) -> ChatRequest:
    """A request whose client does not name the session of those that name none."""
    session = request.client.session
    if session is None or not _TAKEN.match(session):
        return request
    client = replace(request.client, session=f"{_NAMED}{session}")
    return replace(request, client=client)


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise RequestCancelled("the client closed the connection")
