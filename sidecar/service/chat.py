"""Chat and raw completion: lease, plan, run, and the running requests."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sidecar.config.settings import GenerationConfig
from sidecar.core.errors import (
    GOING_DOWN,
    BadRequest,
    ContextLengthExceeded,
    ModelNotFound,
    TooSlow,
    Unavailable,
)
from sidecar.core.events import Event, Idle, Loading
from sidecar.core.ports import RunningChat
from sidecar.core.requests import ChatRequest, CompletionRequest, join_names
from sidecar.core.turn_token import make_token
from sidecar.core.warmth import WARM
from sidecar.engine.adapters.adapter_files import (
    AdapterFiles,
    AdapterFolder,
)
from sidecar.engine.job import Forecast
from sidecar.engine.sampling import Sampling, settle
from sidecar.engine.speculation.source_forms import encoded_pieces, written_forms
from sidecar.engine.text_engine import TextEngine
from sidecar.infra.lru import Lru
from sidecar.infra.metrics import Metrics
from sidecar.infra.session_log import SessionLog
from sidecar.memory.conversation_memory import AssistantOutput, ConversationMemory
from sidecar.output.answer_check import AnswerCheck
from sidecar.output.output_syntax import OutputSyntax, StartMode
from sidecar.output.reasoning_splitter import new_splitter
from sidecar.pipeline.prepare import PreparedPrompt
from sidecar.pipeline.template.chat_template import offered_tools
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import (
    NO_ADAPTER,
    ReadWith,
    Resident,
    require_text,
)
from sidecar.service.audit import Audit
from sidecar.service.checked_answer import CheckedRun, repair_request
from sidecar.service.choice import ChatChoice, Choice, PlainChoice
from sidecar.service.completion import CompletionRun
from sidecar.service.rate_limits import RateLimits
from sidecar.service.request_history import EndedRequest, RequestHistory, Work
from sidecar.service.request_log import RequestLog
from sidecar.service.run_view import RunView
from sidecar.service.structured_output import StructuredOutput, structured_output
from sidecar.service.turn import (
    ChatPlan,
    PlannedRun,
    Receipt,
    Run,
    count,
    remember,
)
from sidecar.service.warmth import explain

logger = logging.getLogger(__name__)

_EARLY_CANCEL_S = 30.0
_LOAD_PATIENCE_S = 1.0  # how long a stream waits for a load before it begins
_Named = tuple[str | None, str]  # the sender's key; the request's or answer's id


R = TypeVar("R", ChatRequest, CompletionRequest)


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """What is told of each request that ran."""

    log: SessionLog
    history: RequestHistory
    audit: Audit
    limits: RateLimits


class ChatService:
    """Starts runs and finds them again by request id. Any thread."""

    def __init__(
        self,
        pool: ResidentPool[ServedModel],
        defaults: GenerationConfig,
        metrics: Metrics,
        adapters: AdapterFolder,
        records: RequestRecords,
    ) -> None:
        self._adapters, self._log = adapters, records.log
        self._history, self._audit = records.history, records.audit
        self._limits = records.limits
        self._cancelled_early: Lru[_Named, float] = Lru(1024, 1024, lambda key, at: 1)
        self._pool = pool
        self._defaults = defaults
        self._metrics = metrics
        self._lock = threading.Lock()
        self._running: dict[_Named, list[Run]] = {}

    def use(self, defaults: GenerationConfig) -> None:
        """Settle by other defaults what later requests do not say."""
        self._defaults = defaults

    def start_chat(
        self,
        request: ChatRequest,
        timeout_s: float,
        is_connected: Callable[[], bool] = _always,
    ) -> RunningChat:
        """
        Admit a chat request; everything that can be refused is refused here.

        Args:
            is_connected: whether the client is still there: else the work stops.
        Raises:
            SidecarError: bad messages, too long, busy, loading, unknown model.
        """
        ends_at = time.monotonic() + timeout_s
        request = self._named(request)
        is_kept = not request.client.is_batch
        run, plan, memory = self._start(
            request, timeout_s, is_connected, is_kept=is_kept
        )
        if (form := plan.checked) is None:
            return run

        def repair(text: str, found: AnswerCheck) -> Run:
            left_s = max(ends_at - time.monotonic(), 1.0)
            again = repair_request(request, form, text, found)
            return self._start(again, left_s, is_connected, is_kept=False)[0]

        def note_shown(text: str) -> None:
            shown = AssistantOutput(text, "", (), ())
            memory.note_unkept(plan.prepared.pending_turn, shown)

        return CheckedRun(run, form, request.options.n, repair, note_shown)

    def _start(
        self,
        request: ChatRequest,
        timeout_s: float,
        is_connected: Callable[[], bool],
        *,
        is_kept: bool = True,
    ) -> tuple[Run, ChatPlan, ConversationMemory]:
        """Have it run, and be remembered if it is its client's own."""
        with contextlib.ExitStack() as resources:
            soon_s = request.options.max_ttft_s
            lease = self._pool.lease(request.model, soon_s, time_left_s=timeout_s)
            leased = resources.enter_context(lease)
            resident = require_text(leased)
            adapter = resources.enter_context(self._read_with(resident, request))
            plan = self._plan(resident, request, timeout_s, is_connected, adapter)
            resources.enter_context(resident.cache.reserved(plan.prompt))
            syntax = resident.engine.model.syntax
            log = RequestLog(
                self._log, request, plan.prepared, plan.sampling, syntax.family.name
            )

            memory, pending_turn = resident.memory, plan.prepared.pending_turn
            are_short = resident.pipeline.template.traits.call_ids == "nine"

            def settled(receipt: Receipt) -> None:
                try:
                    if is_kept:
                        remember(resident.pipeline, plan.prepared, receipt)
                finally:
                    memory.answer_ended(pending_turn)
                if memory.is_current(pending_turn):  # not forgotten meanwhile
                    ended = _ended(
                        request, plan.prepared, resident, receipt, self._history
                    )
                    self._history.note(ended)
                    self._audit.ended(ended)
                log.ended(receipt.numbers, receipt.said)

            run = self._run(
                resident,
                plan,
                _chat_choices(plan, syntax, has_short_ids=are_short),
                settled,
                resources.pop_all(),
            )
        memory.answer_begun(pending_turn)
        log.started(run.max_tokens)
        return run, plan, memory

    def require(self, request: ChatRequest | CompletionRequest) -> None:
        """
        Look whether a request names a model and an adapter that are there.

        Raises:
            ModelNotFound, AdapterNotFound.
        """
        model, adapter = self._base_of(request.model)
        self._pool.entry(model)
        if name := request.options.adapter or adapter:
            self._adapters.find(name)

    def is_loaded(self, request: ChatRequest) -> bool:
        """
        Whether a request's model is there, or failed; after a moment at most.

        A request that names the longest time it bears is refused rather than kept.

        Raises:
            SidecarError: it cannot be loaded.
        """
        if request.options.max_ttft_s is not None:
            return True
        model = self._named(request).model
        return self._pool.is_loaded(model, _LOAD_PATIENCE_S)

    def loading(self, model: str, longest_s: float) -> Iterator[Event]:
        """What is sent of a model's load until it has ended in whatever way."""
        for step in self._pool.watch_load(self._base_of(model)[0], longest_s):
            yield Loading(step[0]) if step else Idle()

    def probe(
        self, request: ChatRequest, is_connected: Callable[[], bool] = _always
    ) -> Forecast:
        """What a chat request would cost; nothing is generated or remembered."""
        maximum, request = request.options.max_tokens, self._named(request)
        self.require(request)  # before a model is loaded for it
        with self._pool.lease(request.model) as leased:
            resident = require_text(leased)
            files = self._adapter_files(resident, request)
            adapter = ReadWith(files.digest) if files else NO_ADAPTER
            try:
                prepared = resident.prepare(request, is_connected, adapter)
            except ContextLengthExceeded as error:  # so long that it was not read whole
                found = resident.engine.forecast((error.num_tokens, 0), maximum)
                return replace(found, is_whole=False)
            return resident.forecast(prepared, maximum)

    def start_completion(
        self, request: CompletionRequest, timeout_s: float
    ) -> CompletionRun:
        """
        Admit a raw completion; several prompts are several runs.

        Raises:
            SidecarError: too long, busy, loading, unknown model.
        """
        request = self._named(request)
        self._check_number(request)
        if request.ignored:
            logger.info("completion started ignored=%r", join_names(request.ignored))
        with contextlib.ExitStack() as started:
            runs, echoes = [], []
            for prompt in request.prompts:
                with contextlib.ExitStack() as resources:
                    lease = self._pool.lease(request.model, time_left_s=timeout_s)
                    leased = resources.enter_context(lease)
                    resident = require_text(leased)
                    adapter = resources.enter_context(
                        self._read_with(resident, request)
                    )
                    raw, text = resident.prepare_raw(
                        prompt, request.client, adapter, request.options
                    )
                    resident.restore_raw(raw, _always)
                    resources.enter_context(resident.cache.reserved(raw))
                    sampling = self._sampling(resident, request)
                    choices = [PlainChoice(i) for i in range(request.options.n)]
                    run = self._run(
                        resident,
                        PlannedRun(request, raw, sampling, timeout_s, None),
                        choices,
                        lambda receipt: None,
                        resources.pop_all(),
                    )
                started.callback(run.close)
                runs.append(run)
                echoes.append(text if request.echo else "")
            started.pop_all()
            headers = runs[0].plan.headers
            return CompletionRun(runs, echoes, request.options.n, headers)

    def _check_number(self, request: CompletionRequest) -> None:
        """Else it would take every place before it is refused."""
        with self._pool.lease(request.model) as leased:
            maximum = require_text(leased).engine.max_jobs
        if len(request.prompts) > maximum:
            raise BadRequest(
                f"prompt may hold at most {maximum} prompts", param="prompt"
            )

    def cancel(self, request_id: str, sender: str | None) -> bool:
        """
        Stop a running request; whether there was one.

        Args:
            request_id: its X-Request-ID, or the id of its streamed answer.
            sender: see ClientInfo; nobody stops what came with another key.
        """
        name = (sender, request_id)
        with self._lock:
            running = tuple(self._running.get(name, ()))
            if not running:  # it may come before its request is read whole
                self._cancelled_early.put(name, time.monotonic())
        for run in running:
            run.cancel()
        return bool(running)

    def running(self) -> list[RunView]:
        """What runs or waits, the oldest first."""
        with self._lock:
            runs = {id(run): run for each in self._running.values() for run in each}
        return sorted((run.view() for run in runs.values()), key=lambda v: v.number)

    def stop_any(self, request_id: str) -> bool:
        """Stop a running request, whoever sent it; whether there was one."""
        with self._lock:
            runs = [
                run
                for (_, name), each in self._running.items()
                for run in each
                if name == request_id
            ]
        for run in runs:
            run.cancel()
        return bool(runs)

    def stop(self) -> None:
        """Stop all that runs: the server goes down, and says so."""
        with self._lock:
            running = [run for runs in self._running.values() for run in runs]
        for run in running:
            run.cancel(Unavailable(GOING_DOWN, retry_after_s=5))

    def _plan(
        self,
        resident: Resident,
        request: ChatRequest,
        timeout_s: float,
        is_connected: Callable[[], bool],
        adapter: ReadWith,
    ) -> ChatPlan:
        prepared = resident.prepare(request, is_connected, adapter)
        maximum, engine = request.options.max_tokens, resident.engine
        held = StructuredOutput()
        are_all_held = self._defaults.tool_grammar == "calls"
        if request.needs_constraint or (request.tools and are_all_held):
            start = _start_mode(engine.model.syntax, prepared)
            held = structured_output(request, engine, start, self._defaults)
        unheld, options = held.unheld, request.options
        if options.prediction and not engine.drafts(prepared.model, options.n):
            unheld = (*unheld, "prediction")
        found = resident.forecast(prepared, maximum)
        _require_ttft(found, request.options.max_ttft_s)
        prepared = resident.restore(prepared, is_connected)
        sampling = self._sampling(resident, request)
        return ChatPlan(
            request,
            prepared.model,
            sampling,
            timeout_s,
            held.constraint,
            prepared,
            found,
            unheld,
            held.tools,
            held.checked,
        )

    def _named(self, request: R) -> R:
        """The same, its model and its adapter each by a name of its own."""
        model, adapter = self._base_of(request.model)
        if not adapter:
            return request
        asked = request.options.adapter
        if asked and asked != adapter:
            raise BadRequest(
                f"adapter must be left out, or be {adapter}: model names it",
                param="adapter",
            )
        options = replace(request.options, adapter=adapter)
        return replace(request, model=model, options=options)

    def _base_of(self, model: str) -> tuple[str, str]:
        """What `base:adapter` means; a model whose own name has a colon is itself."""
        base, colon, adapter = model.rpartition(":")
        if not (base and colon) or self._adapters.root is None:
            return model, ""
        with contextlib.suppress(ModelNotFound):
            self._pool.entry(model)
            return model, ""
        self._pool.entry(base)
        self._adapters.find(adapter, "model")
        return base, adapter

    @contextlib.contextmanager
    def _read_with(
        self, resident: Resident, request: ChatRequest | CompletionRequest
    ) -> Iterator[ReadWith]:
        """The adapter that a request asks for, in the bank for as long as it runs."""
        files = self._adapter_files(resident, request)
        if files is None:
            yield NO_ADAPTER
            return
        with contextlib.ExitStack() as leased:
            try:
                row = leased.enter_context(resident.engine.adapters.leased(files))
            except BadRequest as error:
                if request.options.adapter:
                    raise
                raise resident.broken_adapter(error) from None
            yield ReadWith(files.digest, row)

    def _adapter_files(
        self, resident: Resident, request: ChatRequest | CompletionRequest
    ) -> AdapterFiles | None:
        """The adapter that a request names, else its model's own; None: neither."""
        if name := request.options.adapter:
            resident.require_bare()
            return self._adapters.find(name)
        return resident.own_adapter()

    def _sampling(
        self, resident: Resident, request: ChatRequest | CompletionRequest
    ) -> Sampling:
        own = resident.engine.model.generation_config
        return settle(request.options.sampling, self._defaults, own)

    def _run(
        self,
        resident: Resident,
        plan: PlannedRun,
        choices: Sequence[Choice],
        settle_chat: Callable[[Receipt], None],
        resources: contextlib.ExitStack,
    ) -> Run:
        """Have a plan run; it is found by its id until it is closed."""
        request, engine, metrics = plan.request, resident.engine, self._metrics

        def settled(receipt: Receipt) -> None:
            settle_chat(receipt)
            count(receipt, metrics)
            if self._limits.is_on:
                self._limits.computed(request.client.limited_as, receipt.num_computed)

        with resources:
            job = engine.submit(
                plan.prompt,
                plan.sampling,
                request.options,
                plan.constraint,
                lambda: _repeatable(request, engine),
            )
            resources.callback(engine.release, job)
            metrics.active.inc()
            resources.callback(metrics.active.dec)
            sender = request.client.sender
            name = (sender, request.request_id)
            names = (name, (sender, request.answer_id))
            resources.callback(lambda: self._forget(names, run))
            process = engine.guard.process
            run = Run(plan, job, choices, settled, resources.pop_all(), process)
        with self._lock:
            for each in names:
                self._running.setdefault(each, []).append(run)
            cancelled_at = self._cancelled_early.pop(name)
        if cancelled_at and time.monotonic() - cancelled_at < _EARLY_CANCEL_S:
            run.cancel()
        return run

    def _forget(self, names: Sequence[_Named], run: Run) -> None:
        with self._lock:
            for name in names:
                running = self._running.get(name, [])
                if run in running:
                    running.remove(run)
                if not running:
                    self._running.pop(name, None)


def _ended(
    request: ChatRequest,
    prepared: PreparedPrompt,
    resident: Resident,
    receipt: Receipt,
    history: RequestHistory,
) -> EndedRequest:
    usage, report, warmth = receipt.usage, prepared.report, WARM
    token_s, cached = resident.engine.token_s, usage.cached_tokens
    is_cold = report.earlier is None or report.lost_tokens(usage.prompt_tokens, cached)
    if receipt.ttft_s is not None and is_cold:
        warmth = explain(request, prepared, usage, resident, history)
    return EndedRequest(
        request.request_id,
        time.time(),
        request.client.user_agent,
        resident.name,
        prepared.pending_turn.conversation,
        receipt.outcome,
        Work(usage.prompt_tokens, cached, cached * token_s),
        usage.completion_tokens,
        receipt.ttft_s,
        round(receipt.seconds, 3),
        warmth,
    )


def _repeatable(
    request: ChatRequest | CompletionRequest, engine: TextEngine
) -> Iterable[list[int]]:
    """Ids of what its tools have said, as the model would write it."""
    if isinstance(request, CompletionRequest):
        return []
    results = [one.text for one in request.messages if one.role == "tool"]
    if not results:
        return []
    return encoded_pieces(written_forms(results), engine.encode)


def _chat_choices(
    plan: ChatPlan, syntax: OutputSyntax, *, has_short_ids: bool
) -> list[ChatChoice]:
    """How each answer of a chat is cut and sent."""
    request, prepared = plan.request, plan.prepared
    tools = plan.held_tools or offered_tools(request)
    token_of = functools.partial(
        make_token, prepared.pending_turn.turn, with_text=not request.thinking.is_shown
    )
    start, held = _start_mode(syntax, prepared), plan.constraint
    is_held = held is not None and held.is_form
    are_calls_held = held is not None and held.matcher is not None
    must_call = bool(tools) and request.tool_choice.mode in ("required", "named")
    return [
        ChatChoice(
            index,
            new_splitter(
                syntax,
                start,
                tools,
                is_held=is_held,
                are_calls_held=are_calls_held,
                begun=request.begun_text,
            ),
            token_of,
            is_single=request.tool_choice.is_single,
            must_call=are_calls_held and must_call,
            has_short_ids=has_short_ids,
        )
        for index in range(request.options.n)
    ]


def _start_mode(syntax: OutputSyntax, prepared: PreparedPrompt) -> StartMode:
    if prepared.opens_thinking:
        return "on"
    closing = syntax.markers.think_close.lower()
    closed = prepared.text.rstrip().lower().endswith(closing)
    if not prepared.thinking or closed:
        return "off"
    return "on" if syntax.family.always_reasons else "undecided"


def _require_ttft(found: Forecast, max_ttft_s: float | None) -> None:
    """
    Refuse what would begin too late, while a router can still send it elsewhere.

    Raises:
        TooSlow: the first token would take longer than the request allows.
    """
    if max_ttft_s is not None and found.predicted_ttft_s > max_ttft_s:
        raise TooSlow(
            f"the first token would take about {found.predicted_ttft_s:.1f} s, and "
            f"mlx_max_ttft_s is {max_ttft_s:g}",
            param="mlx_max_ttft_s",
        )
