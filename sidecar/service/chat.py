"""Chat and raw completion: lease, prepare, submit, and the running requests."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from sidecar.config.settings import GenerationConfig
from sidecar.core.errors import ContextLengthExceeded
from sidecar.core.prompt import PreparedPrompt
from sidecar.core.requests import ChatRequest, CompletionRequest, Tool
from sidecar.core.turn_token import make_token
from sidecar.engine.pool import EnginePool
from sidecar.engine.sampling import settle
from sidecar.engine.text import TextEngine
from sidecar.infra.lru import Lru
from sidecar.infra.metrics import Metrics
from sidecar.infra.session_log import SessionLog
from sidecar.output.families import OutputSyntax
from sidecar.output.reasoning_splitter import StartMode
from sidecar.output.tool_calls import is_complete_call
from sidecar.pipeline.template.chat_template import offered_tools
from sidecar.service.choice import ChatChoice, Choice, PlainChoice
from sidecar.service.commit import TurnRecorder
from sidecar.service.completion import CompletionRun
from sidecar.service.forecast import Forecast, forecast, forecast_of, require_ttft
from sidecar.service.generation import Generation
from sidecar.service.request_log import RequestLog
from sidecar.service.served_model import ServedModel

_EARLY_CANCEL_S = 30.0
_Named = tuple[str | None, str]  # the sender's key, the request id it chose


def _always() -> bool:
    return True


class ChatService:
    """Starts generations and finds them again by request id. Any thread."""

    def __init__(
        self,
        pool: EnginePool[ServedModel],
        defaults: GenerationConfig,
        metrics: Metrics,
        log: SessionLog,
    ) -> None:
        self._log = log
        self._cancelled_early: Lru[_Named, float] = Lru(1024, 1024, lambda key, at: 1)
        self._pool = pool
        self._defaults = defaults
        self._metrics = metrics
        self._lock = threading.Lock()
        self._running: dict[_Named, list[Generation]] = {}

    def start_chat(
        self,
        request: ChatRequest,
        timeout_s: float,
        is_connected: Callable[[], bool] = _always,
    ) -> Generation:
        """
        Admit a chat request; everything that can be refused is refused here.

        Args:
            is_connected: whether the client is still there: else the work stops.
        Raises:
            SidecarError: bad messages, too long, busy, loading, unknown model.
        """
        with contextlib.ExitStack() as resources:
            served = resources.enter_context(self._pool.lease(request.model))
            prompt = served.prepare(request, is_connected)
            found = forecast(served.engine, prompt, request.options.max_tokens)
            require_ttft(found, request.options.max_ttft_s)
            tools = offered_tools(request)
            syntax = served.engine.model.syntax
            token_of = functools.partial(
                make_token, prompt.turn, with_text=not request.thinking.is_shown
            )
            choices = [
                _chat_choice(index, (syntax, tools), prompt, token_of)
                for index in range(request.options.n)
            ]
            generation = self._start(
                served.engine, prompt, request, choices,
                timeout_s, resources.pop_all(),
            )  # fmt: skip
            log = RequestLog(self._log, request, prompt, syntax.family.name)
            generation.record(TurnRecorder(served.pipeline, prompt, log))
            generation.headers["x-mlx-predicted-ttft-s"] = str(found.predicted_ttft_s)
            log.started(*generation.plan)
            return generation

    def probe(
        self, request: ChatRequest, is_connected: Callable[[], bool] = _always
    ) -> Forecast:
        """What a chat request would cost; nothing is generated or remembered."""
        most = request.options.max_tokens
        with self._pool.lease(request.model) as served:
            try:
                prompt = served.prepare(request, is_connected)
            except ContextLengthExceeded as error:  # so long that it was not read whole
                return forecast_of(served.engine, (error.num_tokens, 0), most)
            return forecast(served.engine, prompt, most)

    def start_completion(
        self, request: CompletionRequest, timeout_s: float
    ) -> CompletionRun:
        """
        Admit a raw completion; several prompts are several generations.

        Raises:
            SidecarError: too long, busy, loading, unknown model.
        """
        with contextlib.ExitStack() as started:
            generations, echoes = [], []
            for prompt in request.prompts:
                resources = contextlib.ExitStack()
                with resources:
                    served = resources.enter_context(self._pool.lease(request.model))
                    raw = served.prepare_raw(prompt, request.client)
                    choices = [PlainChoice(i) for i in range(request.options.n)]
                    generation = self._start(
                        served.engine, raw, request, choices, timeout_s,
                        resources.pop_all(),
                    )  # fmt: skip
                started.callback(generation.close)
                generations.append(generation)
                echoes.append(raw.text if request.echo else "")
            started.pop_all()
            return CompletionRun(generations, echoes, request.options.n)

    def cancel(self, request_id: str, sender: str | None) -> bool:
        """
        Stop a running request; whether there was one.

        Args:
            sender: see ClientInfo; nobody stops what came with another key.
        """
        name = (sender, request_id)
        with self._lock:
            running = tuple(self._running.get(name, ()))
            if not running:  # it may come before its request is read whole
                self._cancelled_early.put(name, time.monotonic())
        for generation in running:
            generation.cancel()
        return bool(running)

    def _start(  # noqa: PLR0913 - one use case's own ingredients
        self,
        engine: TextEngine,
        prompt: PreparedPrompt,
        request: ChatRequest | CompletionRequest,
        choices: list[ChatChoice] | list[PlainChoice],
        timeout_s: float,
        resources: contextlib.ExitStack,
    ) -> Generation:
        with resources:
            sampling = settle(
                request.options.sampling,
                self._defaults,
                engine.model.generation_config,
            )
            job = engine.submit(prompt, sampling, request.options)
            resources.callback(engine.release, job)
            all_choices: list[Choice] = [*choices]
            generation = Generation(
                job, all_choices, timeout_s, self._metrics, resources.pop_all()
            )
            name = (request.client.sender, request.request_id)
            generation.on_close(lambda: self._forget(name, generation))
        with self._lock:
            self._running.setdefault(name, []).append(generation)
            cancelled_at = self._cancelled_early.get(name)
        if cancelled_at and time.monotonic() - cancelled_at < _EARLY_CANCEL_S:
            generation.cancel()
        return generation

    def _forget(self, name: _Named, generation: Generation) -> None:
        with self._lock:
            running = self._running.get(name, [])
            if generation in running:
                running.remove(generation)
            if not running:
                self._running.pop(name, None)


def _chat_choice(
    index: int,
    output: tuple[OutputSyntax, tuple[Tool, ...]],
    prompt: PreparedPrompt,
    token_of: Callable[[str], str],
) -> ChatChoice:
    syntax, tools = output
    complete = functools.partial(is_complete_call, syntax=syntax.tools, tools=tools)
    start = _start_mode(syntax, prompt)
    splitter = syntax.new_splitter(start, complete, has_tools=bool(tools))
    return ChatChoice(index, splitter, (syntax.tools, tools), token_of)


def _start_mode(syntax: OutputSyntax, prompt: PreparedPrompt) -> StartMode:
    if prompt.opens_thinking:
        return "on"
    closed = prompt.text.rstrip().lower().endswith(syntax.markers.think_close.lower())
    if not prompt.thinking or closed:
        return "off"
    return "on" if syntax.family.always_reasons else "undecided"
