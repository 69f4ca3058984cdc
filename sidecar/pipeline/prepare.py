"""
The whole input side: messages -> what the model reads.

heal -> find volatile spans -> render, once plain and once with marks -> canonical ids
-> closest prompts before -> pin -> splice -> model ids (docs/reuse.md s3).
"""

import functools
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.errors import RequestCancelled
from sidecar.core.prompt import (
    ChatTokenizer,
    PrefixMatcher,
    PreparedPrompt,
)
from sidecar.core.requests import ChatRequest, ClientInfo, Message, ToolCall
from sidecar.infra.counters import Counters
from sidecar.memory import healing_store, session_turn_store
from sidecar.memory.healing_store import Context, Healed, HealingStore, KnownTurn
from sidecar.memory.session_turn_store import Scope, TurnStore
from sidecar.pipeline.reuse.best_form import Answer, Question, ReuseChooser
from sidecar.pipeline.reuse.first_difference import DriftReport
from sidecar.pipeline.reuse.lineage import LineageIndex, LineageRecord, pack
from sidecar.pipeline.reuse.own_turns import Recalled, recall
from sidecar.pipeline.reuse.prompt_ids import (
    canonical_ids,
    end_of_message,
    rank_boundaries,
)
from sidecar.pipeline.reuse.report import COUNTED, counted, make_report
from sidecar.pipeline.settings import PipelineSettings
from sidecar.pipeline.template.chat_template import (
    ChatTemplate,
    offered_tools,
    state_choice,
)
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.pipeline.template.length import check_length
from sidecar.pipeline.template.marked_render import Layout, lay_out
from sidecar.pipeline.template.turn_frames import FrameCache
from sidecar.pipeline.template.turn_markers import Frame, Start
from sidecar.volatile import spans
from sidecar.volatile.rules import RuleSet
from sidecar.volatile.spans import SpanKey


@dataclass(frozen=True, slots=True)
class Draft:
    """
    What will be remembered of a prompt if its answer ends cleanly.

    Args:
        as_sent: whether the prompt says no more than the request does.
        epoch: how often all had been forgotten when it was prepared.
    """

    record: LineageRecord
    context: Context
    told: Mapping[SpanKey, str]
    vanishing: tuple[str, str] | None
    digests: tuple[str, ...]
    start: Start | None
    lead_ids: tuple[int, ...]
    as_sent: bool
    client: ClientInfo = ClientInfo()
    epoch: int = 0


class Pipeline:
    """The input side of one loaded model, and its memory. Any thread."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        think_open: str,
        model_key: str,
        ruleset: RuleSet,
        settings: PipelineSettings,
    ) -> None:
        self.template = ChatTemplate(tokenizer)
        self.encoder = PromptEncoder(tokenizer)
        self.healing = HealingStore(settings.healing_entries, settings.healing_bytes)
        self.lineage = LineageIndex(
            model_key, settings.record_ttl_s, use_blocks=settings.use_block_index
        )
        self.turns = TurnStore(settings.session_idle_s)
        self.drift = DriftReport()
        self.counters = Counters(COUNTED)
        self._tokenizer = tokenizer
        self._think_open = think_open
        self._ruleset = ruleset
        self._settings = settings
        self._keeps_thinking = (
            settings.preserve_thinking and self.template.traits.preserve_thinking
        )
        self._frames = FrameCache(self.template, self.encoder)
        self._epoch = 0
        self._chooser = ReuseChooser(
            self.encoder, self.lineage, ruleset, settings.min_gain,
            pinning=settings.pinning,
        )  # fmt: skip

    def prepare(
        self,
        request: ChatRequest,
        matcher: PrefixMatcher,
        most_tokens: int = sys.maxsize,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> PreparedPrompt:
        """
        Find the form of a request that reuses most, and say nothing false in it.

        Args:
            most_tokens: the longest prompt that can be answered.
            is_wanted: whether the client is still there; asked between messages.

        Raises:
            BadRequest: the template refuses the conversation.
            ContextLengthExceeded: it is so much too long that a part tells.
            RequestCancelled: nobody waits for the answer any more.
        """
        check = functools.partial(_check_wanted, is_wanted)
        epoch = self._epoch
        thinking = request.thinking.enabled
        if thinking is None:
            thinking = self._settings.default_thinking
        kwargs = self._template_kwargs(request, thinking)
        frame = self._frames.get(kwargs) if self._settings.splicing else None
        found = self._recall(request, frame, check)
        layout = self._lay_out(request, kwargs, (found, frame), check)
        check_length(layout.elements, self.encoder, most_tokens)
        check()
        question = self._question(request, found, layout, frame)
        check()
        answer, is_false = self._choose(question, matcher, most_tokens)
        prompt = self._prepared(question, answer, found, (frame, thinking))
        report = replace(prompt.report, is_proved=layout.is_proved)
        moved = counted(report, answer, num_healed=len(found.healed))
        if is_false:
            moved["invariant_violation"] = 1
        self.counters.add_all(moved)
        report = replace(report, counted=moved)
        draft = replace(prompt.draft, client=request.client, epoch=epoch)
        return replace(prompt, report=report, draft=draft)

    @property
    def can_splice(self) -> bool:
        """Whether this template lets a turn's own ids be put back."""
        kwargs = self._thinking_kwargs(self._settings.default_thinking)
        return self._settings.splicing and self._frames.get(kwargs) is not None

    def commit(
        self,
        prompt: PreparedPrompt,
        text: str,
        reasoning: str,
        calls: Sequence[ToolCall],
        sampled: tuple[int, ...],
    ) -> None:
        """
        Remember a cleanly finished turn.

        Args:
            text, reasoning, calls: what the client was sent.
            sampled: its ids without the stop token; empty if they must not be
                spliced (the turn ended at a stop string).
        """
        draft: Draft = prompt.draft
        if draft.epoch != self._epoch:
            return
        self.lineage.add(draft.record)
        scope = draft.record.scope
        parents, num_tokens = draft.client.parents, len(prompt.model_ids)
        if not self.turns.advance(scope, draft.digests, num_tokens, parents):
            self.counters.add("turn_write_refused")
        self.healing.remember_calls(calls, scope)
        visible = healing_store.visible_hash(text, calls)
        if visible is None or draft.start is None or not sampled:
            return
        raw = (*draft.lead_ids, *sampled)
        turn = Healed(
            draft.start.header, raw, self._tokenizer.decode(list(raw)), reasoning,
            draft.vanishing, draft.start.lead,
        )  # fmt: skip
        ids = [prompt.turn, *(call.id for call in calls)]
        context = draft.context.behind(draft.vanishing)
        known = KnownTurn(context, scope, turn, draft.told, draft.as_sent)
        self.healing.record(visible, known, ids)

    def keep_past(self, prompt: PreparedPrompt) -> None:
        """
        Remember what a prompt looked like whose answer was broken off.

        Some of it may have been computed: asked again with a new clock, it goes on.
        """
        draft: Draft = prompt.draft
        if draft.epoch == self._epoch:
            self.lineage.add(draft.record)

    def forget(self) -> None:
        """Forget all prompts, turns and conversations, those that run included."""
        self._epoch += 1
        self.lineage.clear()
        self.healing.clear()
        self.turns.clear()
        self.drift.clear()
        self.encoder.clear()

    def note_cost(self, prompt: PreparedPrompt, num_prefilled: int) -> None:
        """Count what a divergence cost, for the drift report."""
        place = prompt.report.divergence
        if place is not None and prompt.draft.epoch == self._epoch:
            self.drift.note(prompt.draft.client.user_agent, place, num_prefilled)
            self.counters.add("resumed_prefill_tokens", num_prefilled)

    def _recall(
        self, request: ChatRequest, frame: Frame | None, check: Callable[[], None]
    ) -> Recalled:
        to_alter = self._ruleset if self._settings.pinning else None
        to_mark = self._ruleset if self._settings.canonicalize else None
        messages = spans.normalise(state_choice(request), to_alter)
        to_move = to_mark and to_alter
        return recall(self.healing, messages, request, frame, (to_mark, to_move), check)

    def _lay_out(
        self,
        request: ChatRequest,
        kwargs: Mapping[str, Any],
        seen: tuple[Recalled, Frame | None],
        check: Callable[[], None],
    ) -> Layout:
        found, frame = seen
        tools = offered_tools(request)

        def render(messages: Sequence[Message]) -> str:
            check()
            return self.template.render(messages, tools, kwargs)

        return lay_out(found.marked, found.healed, frame, render)

    def _choose(
        self, question: Question, matcher: PrefixMatcher, most_tokens: int
    ) -> tuple[Answer, bool]:
        """The answer, and whether a first one was false and is not used."""
        answer = self._chooser.choose(question, matcher, most_tokens)
        if self._settings.verify and not self._says_its_text(answer):
            return self._chooser.plain(question, matcher), True
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
        self,
        request: ChatRequest,
        recalled: Recalled,
        layout: Layout,
        frame: Frame | None,
    ) -> Question:
        marked = recalled.marked
        roles = [item.message.role for item in marked]
        found = canonical_ids(layout.elements, roles, self.encoder)
        client = request.client
        session = client.session or session_turn_store.implicit_session(found.ids)
        continued = self.healing.continued(marked, client.api_key_id, session)
        own = [*recalled.healed]
        if continued is not None:
            own.append(continued[0])
            scope = continued[1]
        elif client.session is not None:
            scope = Scope(
                client.api_key_id, session, session_turn_store.thread_name(marked)
            )
        else:
            scope = recalled.scope or session_turn_store.new_chat(
                client.api_key_id, session
            )
        is_named = client.session is not None or continued is not None
        return Question(
            layout.elements, found, scope, self._frames.header_tokens(frame),
            first_own=min(own, default=None),
            is_proved=is_named or recalled.is_proved,
        )  # fmt: skip

    def _says_its_text(self, answer: Answer) -> bool:
        """CACHE_VERIFY: the ids are those of the text that was put together."""
        found, text = answer.assembled.ids, answer.assembled.text
        wanted = self.encoder.encode(text).ids  # some decoders add or take spaces
        decode = self._tokenizer.decode
        return decode(list(found)) == decode(list(wanted))

    def _prepared(
        self,
        question: Question,
        answer: Answer,
        found: Recalled,
        how: tuple[Frame | None, bool],
    ) -> PreparedPrompt:
        frame, thinking = how
        assembled, scope = answer.assembled, question.scope
        digests = tuple(session_turn_store.message_digests(found.kept))
        change = self.turns.compare(scope, digests)
        opening = assembled.text.rstrip().lower()
        return PreparedPrompt(
            model_ids=assembled.ids,
            text=assembled.text,
            opens_thinking=opening.endswith(self._think_open.lower()),
            thinking=thinking,
            boundaries=rank_boundaries(assembled.boundaries, found.marked),
            is_guest=self.turns.is_guest(scope, len(assembled.ids)),
            session=scope.session,
            turn=secrets.token_hex(16),
            own_len=end_of_message(assembled.boundaries, question.first_own),
            report=make_report(
                question, answer, change, self._tokenizer, found.marked
            ),
            draft=self._draft(question, answer, found, (frame, digests)),
        )  # fmt: skip

    def _draft(
        self,
        question: Question,
        answer: Answer,
        found: Recalled,
        seen: tuple[Frame | None, tuple[str, ...]],
    ) -> Draft:
        frame, digests = seen
        record = LineageRecord(
            pack(question.canonical.ids), answer.stands, answer.notes, question.scope
        )
        last_role = found.marked[-1].message.role
        start = frame.starts.get(last_role) if frame is not None else None
        lead_ids = self._frames.lead_ids(start)
        ids = answer.assembled.ids
        if start is not None and ids[len(ids) - len(lead_ids) :] != lead_ids:
            start = None  # the header's ids are not where they should be
        return Draft(
            record, found.context, found.told, found.vanishing, digests, start,
            lead_ids, as_sent=answer.pins is None,
        )  # fmt: skip


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise RequestCancelled("the client closed the connection")
