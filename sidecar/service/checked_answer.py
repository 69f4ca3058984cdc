"""
An answer that is checked against its schema once it is there.

A grammar cannot hold an answer to all that JSON Schema says, and to nothing where it
does not know the model's tokenizer. Such an answer is kept back until it is whole. Its
JSON is sent if it keeps to the schema; else the model is asked once more, and is shown
what was wrong (docs/structured-output.md).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sidecar.core.errors import (
    AnswerInvalid,
    RequestCancelled,
    SidecarError,
)
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    Idle,
    TextDelta,
    ToolCallStarted,
    Usage,
)
from sidecar.core.ports import RunningChat
from sidecar.core.requests import ChatRequest, Message, OutputFormat, ToolChoice
from sidecar.output.answer_check import AnswerCheck, check, schema_text

logger = logging.getLogger(__name__)

_TEXT = (TextDelta, ChoiceFinished)


def repair_request(
    request: ChatRequest, form: OutputFormat, text: str, found: AnswerCheck
) -> ChatRequest:
    """The request that shows a model its answer, and what is wrong with it."""
    asked = (
        f"Your answer is not what was asked for: {found.fault}, at {found.path}. "
        f"Answer again with JSON alone, of this schema: {schema_text(form)}"
    )
    turns = Message("assistant", (text,)), Message("user", (asked,))
    choice = ToolChoice("none") if request.tools else request.tool_choice
    messages = (*request.messages, *turns)
    return replace(request, messages=messages, tool_choice=choice)


class CheckedRun:
    """
    A run whose text is sent when it has been checked. It is used as a Run is.

    Args:
        num_choices: where there are several, none is asked for again.
        repair: starts the answer to an answer that was wrong.
        note_shown: is given the text that is sent where the model wrote another.
    """

    def __init__(
        self,
        run: RunningChat,
        form: OutputFormat,
        num_choices: int,
        repair: Callable[[str, AnswerCheck], RunningChat],
        note_shown: Callable[[str], None],
    ) -> None:
        self._runs = [run]
        self._form = form
        self._is_alone = num_choices == 1
        self._repair = repair
        self._note_shown = note_shown
        self._usages: list[Usage] = []

    @property
    def headers(self) -> Mapping[str, str]:
        """What its client may want to know before the first token."""
        return self._runs[0].headers

    @property
    def usage(self) -> Usage:
        """What is known of it before the first token."""
        return self._runs[0].usage

    def events(self) -> Iterator[Event]:
        """
        Events as those of a run; the text of a choice comes last, as a whole.

        Raises:
            AnswerInvalid: a strict schema was not kept to.
            SidecarError: what a run raises.
        """
        held: defaultdict[int, list[Event]] = defaultdict(list)
        calling: set[int] = set()
        for event in self._runs[0].events():
            if isinstance(event, Finished):
                self._usages.append(event.usage)
            elif isinstance(event, ToolCallStarted):
                calling.add(event.choice)
                yield from held.pop(event.choice, ())
                yield event
            elif isinstance(event, _TEXT) and event.choice not in calling:
                held[event.choice].append(event)
                yield Idle()
            else:
                yield event
        self._runs[0].close()  # else its place and its lease were in the repair's way
        for answer in held.values():
            yield from self._checked(answer)
        yield Finished(Usage.total(self._usages))

    def close(self) -> None:
        """Free everything; idempotent."""
        for run in self._runs:
            run.close()

    def _checked(self, answer: Sequence[Event]) -> Iterator[Event]:
        """The text of one choice, and its end."""
        if not _is_whole(answer):
            yield from answer
            return
        text = _text_of(answer)
        yield Idle()
        found = check(self._form, text)
        if found is not None and found.fault and self._is_alone:
            again: list[Event] = []
            yield from self._repaired(text, found, again)
            if _is_whole(again):
                text = _text_of(again)
                found = check(self._form, text)
        if self._form.is_strict and (found is None or found.fault):
            raise _invalid(self._form, found)
        shown = text if found is None or found.fault else found.text
        if shown == _text_of(answer):
            yield from answer
            return
        self._note_shown(shown)
        end = answer[-1]
        assert isinstance(end, ChoiceFinished)
        yield TextDelta(end.choice, shown)
        yield end

    def _repaired(
        self, text: str, found: AnswerCheck, answer: list[Event]
    ) -> Iterator[Event]:
        """
        Ask again; the text that comes is put into `answer`.

        Where there is no room for that, or no time, the first answer is the last.
        """
        try:
            second = self._repair(text, found)
            self._runs.append(second)
            for event in second.events():
                if isinstance(event, Finished):
                    self._usages.append(event.usage)
                elif isinstance(event, _TEXT):
                    answer.append(event)
                yield Idle()
        except RequestCancelled:
            raise
        except SidecarError as error:
            logger.info("an answer could not be asked for again: %s", error.code)
            answer.clear()


def _invalid(form: OutputFormat, found: AnswerCheck | None) -> AnswerInvalid:
    """The error of an answer that is refused; its keyword is the schema's own."""
    if found is None:
        message = f"the model's answer could not be checked against {form.param}"
        return AnswerInvalid(message, param=form.param)
    where = f"{found.keyword} at {found.path}" if found.keyword else found.fault
    message = f"the model's answer does not keep to {form.param}: {where}"
    return AnswerInvalid(message, param=form.param, path=found.path)


def _is_whole(answer: Sequence[Event]) -> bool:
    """Whether the model ended it, not a limit or a stop string of its client."""
    end = answer[-1] if answer else None
    if not isinstance(end, ChoiceFinished):
        return False
    return end.reason == "stop" and end.stop_string is None


def _text_of(answer: Sequence[Event]) -> str:
    return "".join(event.text for event in answer if isinstance(event, TextDelta))
