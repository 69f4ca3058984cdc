"""What models were found to be able to do (service/capability_probe), and kept."""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sidecar.kv.disk.record_file import RecordFile
from sidecar.output.syntax_settings import NAMES

PROBE_VERSION = 1
_SIMPLE = (str, int, bool, type(None))
_MAX_RECORDS = 256


@dataclass(frozen=True, slots=True)
class CapabilityRecord:
    """
    Of one model; None: that was not found out.

    Args:
        family: of its output. tool_format: in which it wrote a call; "": in none.
        tool_parser: what is to be set for that, as it was not found by itself.
        thinking_tag: that begins its thinking.
        practical_max_tokens: of prompt and answer, that fit this machine's memory.
        probed_at: seconds since 1970. files: digest of the model's files.
    """

    kind: str
    probed_at: int
    files: str
    model_type: str = ""
    family: str = ""
    supports_tools: bool | None = None
    tool_format: str = ""
    tool_parser: str | None = None
    supports_thinking: bool | None = None
    thinking_tag: str = ""
    supports_images: bool = False
    supports_embeddings: bool = False
    supports_speech: bool = False
    supports_transcription: bool = False
    practical_max_tokens: int | None = None
    probe_version: int = PROBE_VERSION

    def as_dict(self) -> dict[str, Any]:
        """For clients: without what only a load needs."""
        shown = asdict(self)
        del shown["files"]
        return {**shown, "is_outdated": self.probe_version != PROBE_VERSION}


class CapabilityRecords:
    """
    The records of one file, by the ids of models. Any thread.

    Args:
        file: where they are kept; None: nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = RecordFile(file, _MAX_RECORDS)
        self._known: dict[
            str, CapabilityRecord | None
        ] = {}  # lists are asked for often

    def find(self, model_id: str) -> CapabilityRecord | None:
        """The record of a model; None: it was not probed."""
        if model_id not in self._known:
            self._known[model_id] = _parsed(self._file.find(model_id))
        return self._known[model_id]

    def find_of(self, model_id: str, files: str) -> CapabilityRecord | None:
        """The same, if the model's files have the digest that was probed."""
        found = self.find(model_id)
        return found if found and found.files == files else None

    def tool_parser(self, model_id: str, files: str) -> str | None:
        """How its calls are read, where that was found out by the probe alone."""
        found = self.find_of(model_id, files)
        parser = found.tool_parser if found else None
        return parser if parser in NAMES["tool_parser"] else None

    def check(self, model_id: str, files: str) -> None:
        """Forget what other files of a model could do."""
        found = self.find(model_id)
        if found is not None and found.files not in ("", files):
            self._known[model_id] = None
            self._file.drop(model_id)

    def keep(self, model_id: str, record: CapabilityRecord) -> None:
        """Remember a model's."""
        self._known[model_id] = record
        self._file.keep(model_id, asdict(record))


def _parsed(found: Any) -> CapabilityRecord | None:
    if not isinstance(found, dict):
        return None
    if not all(isinstance(value, _SIMPLE) for value in found.values()):
        return None
    with contextlib.suppress(TypeError):  # of other names
        return CapabilityRecord(**found)
    return None
