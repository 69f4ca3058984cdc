"""The tools that a model was offered, as those ask for them who read its calls."""

import functools
from collections.abc import Mapping, Sequence

from sidecar.core.requests import Tool
from sidecar.output.calls.python_names import OddNames
from sidecar.output.calls.tool_schema import ToolSchema, Types, declared_types


class OfferedTools:
    """
    The tools of one answer; what their schemas say is found out once.

    Args:
        are_held: a grammar holds their calls: no argument is named that a schema does
            not name, and no text holds its own end.
    """

    def __init__(self, tools: Sequence[Tool], *, are_held: bool = False) -> None:
        self.all = tuple(tools)
        self.are_held = are_held
        self._by_name = {tool.name: tool for tool in reversed(self.all)}
        self._types: dict[str, Mapping[str, Types]] = {}
        self._choices: dict[str, Mapping[str, tuple[str, ...] | None]] = {}
        self._open: dict[str, bool] = {}

    @functools.cached_property
    def odd_names(self) -> OddNames:
        """Names of tools and arguments that Python does not take."""
        schemas = [ToolSchema(tool.parameters) for tool in self.all]
        arguments = [one.name for schema in schemas for one in schema.arguments]
        return OddNames([tool.name for tool in self.all], arguments)

    def has(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._by_name

    def types_of(self, name: str) -> Mapping[str, Types]:
        """The types that a tool's arguments may have; empty: it declares none."""
        if name not in self._types:
            tool = self._by_name.get(name)
            self._types[name] = declared_types(tool.parameters) if tool else {}
        return self._types[name]

    def text_choices(self, name: str, argument: str) -> tuple[str, ...] | None:
        """The texts that an argument of a tool may be; None: any."""
        if name not in self._choices:
            tool = self._by_name.get(name)
            schema = ToolSchema(tool.parameters if tool else {})
            each = ((one.name, one.schema) for one in schema.arguments)
            self._choices[name] = {key: schema.text_choices(one) for key, one in each}
        return self._choices[name].get(argument)

    def declares(self, name: str, argument: str) -> bool:
        """Whether a tool's schema names an argument, or none at all."""
        types = self.types_of(name)
        return not types or argument in types

    def may_have(self, name: str) -> bool:
        """Whether a tool may be given arguments that its schema does not name."""
        if name not in self._open:
            tool = self._by_name.get(name)
            schema = ToolSchema(tool.parameters) if tool else None
            if schema is None:
                self._open[name] = True
            elif self.are_held:
                self._open[name] = schema.takes_any
            else:
                self._open[name] = not schema.is_closed
        return self._open[name]
