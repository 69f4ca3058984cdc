"""
What a model can do, found by asking it: how it calls a tool, whether it thinks.

A probe's questions are requests as any other, behind those that wait. What it finds is
kept and used at the model's next load (residents/capability_record).
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.errors import ModelBusy, ModelPinned, SidecarError
from sidecar.core.events import TextDelta
from sidecar.core.requests import (
    ClientInfo,
    CompletionRequest,
    GenerationOptions,
    Message,
    SamplingParams,
    Tool,
)
from sidecar.engine.loading.checkpoint_files import read_config
from sidecar.output.format_search import find_parser, parser_of, read_call
from sidecar.output.output_syntax import OutputSyntax
from sidecar.output.reasoning_splitter import new_splitter
from sidecar.residents.capability_record import (
    CapabilityRecord,
    CapabilityRecords,
)
from sidecar.residents.detection import TEXT_KINDS
from sidecar.residents.model_state import ModelView, ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import Resident, require_text
from sidecar.service.chat import ChatService
from sidecar.service.probe_step import ProbeStep, Steps

logger = logging.getLogger(__name__)

Yields = Generator[ProbeStep | None, None, Any]

_QUESTION_S = 900.0
_LOOK_S = 1.0  # how often one that waits for its turn looks whether all is ending
_TOOL_TOKENS, _THINKING_TOKENS = (512, 4000), (2000, 4000)  # more, where it thinks on
_CLIENT = ClientInfo(session="capability probe")
_CITY = {"type": "object", "properties": {"city": {"type": "string"}},
         "required": ["city"]}  # fmt: skip
_WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": _CITY,
}
_TOOL = Tool("get_weather", _CITY, {"type": "function", "function": _WEATHER})
_ASKS_FOR_A_CALL = "What is the weather in {}? Call get_weather to find it out."
_CITIES = ("Rome", "Oslo")
_ASKS_FOR_THOUGHT = (
    "A bat and a ball cost 1.10 together. The bat costs 1 more than the ball. "
    "What does the ball cost?"
)
_MARKER = re.compile(r"<[|｜/]?[A-Za-z_][\w:｜▁. -]{1,40}[|｜]?>|\[[A-Z][A-Z_]{2,30}\]")
_RAW_TOKENS = re.compile("[\u0120\u010a]")  # how byte-level tokenizers spell spaces
_OF_CALLS = re.compile("[|｜_]|tool|call|func|action|invoke", re.IGNORECASE)
_MAX_MARKERS = 5


class CapabilityProbe:
    """Probes one model at a time. Any thread."""

    def __init__(
        self,
        pool: ResidentPool[ServedModel],
        chat: ChatService,
        records: CapabilityRecords,
    ) -> None:
        self._pool, self._chat, self._records = pool, chat, records
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # names of loaded models; adding is atomic

    def begin(self, name: str) -> None:
        """
        Probe a model that was loaded, on a thread of its own, after those before it.

        One that was probed as it is, or was unloaded meanwhile, is let be.
        """

        def run() -> None:
            while not self._lock.acquire(timeout=_LOOK_S):
                if self._pool.is_draining:
                    return
            self._waiting.discard(name)
            try:
                if self._is_known(name):
                    return
                for _ in self._steps(
                    self._pool.entry(name), lambda: not self._pool.is_draining
                ):
                    pass
            except SidecarError as error:
                logger.warning("%s was not probed: %s", name, error.message)
            finally:
                self._lock.release()

        if name not in self._waiting:
            self._waiting.add(name)
            threading.Thread(target=run, name="capability probe", daemon=True).start()

    def _is_known(self, name: str) -> bool:
        if self._pool.entry(name).state == "unloaded":
            return True  # until it is loaded again
        with self._pool.lease(name) as leased:
            if not isinstance(leased, Resident):
                return True  # its kind says what it does
            found = self._records.find_of(self._pool.entry(name).id, leased.files())
        return found is not None and not found.as_dict()["is_outdated"]

    def run(self, name: str, is_connected: Callable[[], bool]) -> Steps:
        """
        Probe a model; what is found is kept.

        Args:
            is_connected: whether somebody still waits for it.
        Returns:
            Its steps as they begin and end, None where nothing is new; the last one's
            value is the record.
        Raises:
            ModelNotFound: there is no such model. Each step: SidecarError: it cannot be
                loaded, or another one is probed.
        """
        return self._locked(self._pool.entry(name), is_connected)

    def _locked(self, entry: ModelView, is_connected: Callable[[], bool]) -> Steps:
        if not self._lock.acquire(blocking=False):
            raise ModelBusy("a model is being probed", retry_after_s=30)
        try:
            yield from self._steps(entry, is_connected)
        finally:
            self._lock.release()

    def _steps(self, entry: ModelView, is_connected: Callable[[], bool]) -> Steps:
        yield ProbeStep("type", "completed", "kind", entry.kind)
        yield ProbeStep("load", "running")
        with self._pool.lease(entry.id, time_left_s=_QUESTION_S) as leased:
            yield ProbeStep("load", "completed")
            begun = CapabilityRecord(entry.kind, int(time.time()), "")
            record: CapabilityRecord | None
            if entry.kind in TEXT_KINDS:
                known = self._records.find(entry.id)
                resident = require_text(leased)
                asking = _Asking(self._chat, resident, entry.id, begun, known)
                record = yield from asking.run(is_connected)
            else:
                record = _of_kind(begun, leased)
                yield ProbeStep("tools", "skipped", "supports_tools", value=False)
                yield ProbeStep("thinking", "skipped", "supports_thinking", value=False)
        if record is None:
            why = "a question was not answered: what was known before stays"
            yield ProbeStep("store", "skipped", "record", error=why)
        elif is_connected():
            self._records.keep(entry.id, record)
            yield ProbeStep("store", "completed", "record", record.as_dict())
        if entry.state == "unloaded":
            with contextlib.suppress(ModelBusy, ModelPinned):
                self._pool.unload(entry.id)
                yield ProbeStep("unload", "completed")


def _of_kind(record: CapabilityRecord, leased: ServedModel) -> CapabilityRecord:
    """Of a model that does not chat: its kind says it."""
    return replace(
        record,
        supports_tools=False,
        supports_thinking=False,
        supports_embeddings=record.kind == "embedding",
        supports_speech=record.kind == "tts",
        supports_transcription=record.kind == "stt",
        practical_max_tokens=leased.max_context,
    )


class _Asking:
    """
    The questions that one model is asked.

    Args:
        known: what was found out before, be it of other weights.
    """

    def __init__(
        self,
        chat: ChatService,
        resident: Resident,
        model_id: str,
        record: CapabilityRecord,
        known: CapabilityRecord | None,
    ) -> None:
        self._chat, self._resident, self._id = chat, resident, model_id
        self._known = known
        model = resident.engine.model
        self._syntax, self._template = model.syntax, resident.pipeline.template
        config = read_config(model.folder) or {}
        self._record = replace(
            record,
            files=resident.files(),
            model_type=str(config.get("model_type", "")),
            family=self._syntax.family.name,
            supports_images=resident.takes_images,
            practical_max_tokens=resident.max_context,
        )

    def run(self, is_connected: Callable[[], bool]) -> Yields:
        """Its steps; in the end the record, None if a question was not answered."""
        record = self._record
        yield ProbeStep("family", "completed", "family", record.family)
        tools = yield from self._tools(is_connected)
        thinking = yield from self._thinking(is_connected)
        most = record.practical_max_tokens
        yield ProbeStep("context", "completed", "practical_max_tokens", most)
        if tools is None or thinking is None:
            return None
        return replace(record, **tools, **thinking)

    def _tools(self, is_connected: Callable[[], bool]) -> Yields:
        yield ProbeStep("tools", "running", "supports_tools")
        try:
            said = yield from self._call(_CITIES[0], is_connected)
            found = self._format_of(said)
            if found != self._usual and not found.get("is_other"):
                # A slip of one answer must not change how all are read.
                again = self._format_of(
                    (yield from self._call(_CITIES[1], is_connected))
                )
                found = self._agreed(found, again)
        except SidecarError as error:
            yield ProbeStep("tools", "failed", "supports_tools", error=error.message)
            return None
        is_there = bool(found) and not found.pop("is_other", False)
        hints = () if is_there else _hints(said, self._syntax, found)
        yield ProbeStep(
            "tools", "completed", "supports_tools", is_there, diagnostics=hints
        )
        return {"supports_tools": is_there, **found}

    @property
    def _parser(self) -> str | None:
        """What an earlier probe found, if its calls are read so now."""
        known = self._known.tool_parser if self._known else None
        return known if known and known == parser_of(self._syntax.calls) else None

    @property
    def _usual(self) -> dict[str, Any]:
        """What is found where nothing is to be changed."""
        own = parser_of(self._syntax.calls) or "its own"
        return {"tool_format": own, "tool_parser": self._parser}

    def _agreed(self, found: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
        """What two answers say; where they differ what was known stays."""
        usual = self._usual
        if usual in (found, again):
            return usual
        if found == again and (found or not self._parser):
            return found
        return usual if self._parser else {}

    def _format_of(self, said: str) -> dict[str, Any]:
        """
        In which format it called the tool; {}: in none that we read.

        A format that is not its template's (`is_other`) is no way to read it.
        """
        found = find_parser(self._syntax, said, [_TOOL])
        shows_one = self._template.traits.tool_calls
        usual = self._usual
        if read_call(self._syntax, said, [_TOOL]) is not None:
            is_usual = found in (None, usual["tool_format"]) or shows_one
            return usual if is_usual else {"tool_format": found, "tool_parser": found}
        if found is None:
            return {}
        if shows_one:
            return {"tool_format": found, "is_other": True}
        return {"tool_format": found, "tool_parser": found}

    def _call(self, city: str, is_connected: Callable[[], bool]) -> Yields:
        """What it says where it should call the tool."""
        messages = [Message("user", (_ASKS_FOR_A_CALL.format(city),))]
        kwargs = {"enable_thinking": False}
        prompt = self._template.render(messages, [_TOOL], kwargs, is_probe=True)
        said = ""
        for most in _TOOL_TOKENS:
            said = yield from self._answer(prompt, most, is_connected)
            if not self._is_open(prompt, said):
                break
        return said

    def _thinking(self, is_connected: Callable[[], bool]) -> Yields:
        """Whether it thinks, and ends to; a template that says so counts."""
        yield ProbeStep("thinking", "running", "supports_thinking")
        messages = [Message("user", (_ASKS_FOR_THOUGHT,))]
        has_switch = "enable_thinking" in str(
            self._resident.engine.model.tokenizer.chat_template
        )
        thinks = False
        try:
            prompt = self._template.render(
                messages, (), {"enable_thinking": True}, is_probe=True
            )
            for most in _THINKING_TOKENS:
                said = yield from self._answer(prompt, most, is_connected)
                thinks = _thinks(self._syntax, prompt, said)
                if thinks or not self._is_open(prompt, said):
                    break
        except SidecarError as error:
            yield ProbeStep("thinking", "failed", "thinking", error=error.message)
            return None
        is_there = thinks or has_switch
        yield ProbeStep("thinking", "completed", "supports_thinking", is_there)
        is_tagged = thinks and not self._syntax.has_channels
        tag = self._syntax.markers.think_open if is_tagged else ""
        return {"supports_thinking": is_there, "thinking_tag": tag}

    def _is_open(self, prompt: str, said: str) -> bool:
        """Whether it was still thinking when its tokens were up."""
        markers, lower = self._syntax.markers, said.lower()
        opener = markers.think_open.lower()
        is_begun = opener in lower or prompt.rstrip().lower().endswith(opener)
        return is_begun and markers.think_close.lower() not in lower

    def _answer(
        self, prompt: str, max_tokens: int, is_connected: Callable[[], bool]
    ) -> Yields:
        """What the model says behind a prompt, its marks in it; nobody waits: none."""
        if not is_connected():
            return ""
        options = GenerationOptions(SamplingParams(seed=0), max_tokens=max_tokens)
        request = CompletionRequest(
            "capability-probe", self._id, (prompt,), options=options, client=_CLIENT
        )
        run = self._chat.start_completion(request, _QUESTION_S)
        said: list[str] = []
        try:
            for event in run.events():
                if isinstance(event, TextDelta):
                    said.append(event.text)
                if not is_connected():
                    break
                yield None
        finally:
            run.close()
        return "".join(said)


def _thinks(syntax: OutputSyntax, prompt: str, said: str) -> bool:
    """Whether it has thought, and then answered."""
    is_begun = prompt.rstrip().lower().endswith(syntax.markers.think_open.lower())
    splitter = new_splitter(syntax, "on" if is_begun else "undecided", ())
    pieces = [*splitter.feed(said), *splitter.flush(is_cut=False)[0]]
    kinds = {piece[0] for piece in pieces if isinstance(piece, tuple) and piece[1]}
    return kinds == {"reasoning", "content"}


def _hints(
    said: str, syntax: OutputSyntax, found: dict[str, Any]
) -> Sequence[dict[str, str]]:
    """What in an answer may be the reason that no call was read."""
    if other := found.get("tool_format"):
        message = f"it writes {other}, its template another format: set tool_parser"
        return [_diagnostic("warning", "other_format", message, said)]
    if _RAW_TOKENS.search(said):
        message = "the tokenizer spells raw tokens"
        return [_diagnostic("error", "unsupported", message, said)]
    own = [syntax.markers.think_open, syntax.markers.think_close]
    own += [mark for calls in syntax.calls for mark in (calls.opener, calls.closer)]
    known = "\n".join(own)
    markers = [one for one in dict.fromkeys(_MARKER.findall(said)) if one not in known]
    unknown = [one for one in markers if _OF_CALLS.search(one)][:_MAX_MARKERS]
    if not unknown:
        return [_diagnostic("info", "no_call", "it answered without a call", said)]
    named = ", ".join(unknown)
    logger.warning("marks of calls that no format knows: %s", named)
    message = f"no call is read between {named}"
    return [_diagnostic("warning", "unknown_markers", message, said)]


def _diagnostic(level: str, category: str, message: str, said: str) -> dict[str, str]:
    return {
        "level": level, "category": category, "message": message,
        "details": said[:300],
    }  # fmt: skip
