"""LiteLLM's process: no garbage is looked for while it imports, and then it is."""

import gc
import sys
from types import ModuleType

import pytest

from litellm_mlx import proxy_process


def test_garbage_is_collected_again_when_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, str]] = []
    fake = ModuleType("litellm")
    fake.__path__ = []  # type: ignore[attr-defined]

    def run_server(prog_name: str) -> None:
        seen.append((gc.isenabled(), prog_name))

    fake.run_server = run_server  # type: ignore[attr-defined]
    # Its parts as well: another test may have imported the real ones, but not all.
    for name in ("litellm", "litellm.proxy", "litellm.proxy.proxy_server"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of the tests' own objects
    proxy_process.main()
    assert seen == [(True, "litellm")]
    assert gc.isenabled()
