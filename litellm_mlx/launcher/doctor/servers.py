"""Who holds the ports, and what the running servers say of themselves."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.ports import (
    Claim,
    Holder,
    PidFile,
    command_of,
    find_holder,
    is_port_taken,
)
from litellm_mlx.launcher.settings import Address, LaunchSettings

_TIMEOUT_S = 3.0
_MIN_TOKENS = 10_000  # before a rate says something
_LOW_RATE = 0.5


def check_ports(settings: LaunchSettings) -> Iterator[Finding]:
    """Free, ours, left over, or a stranger's."""
    wanted = [("sidecar", settings.sidecar, "--port")]
    if settings.proxy is not None:
        wanted.append(("litellm", settings.proxy, "--proxy-port"))
    for name, address, flag in wanted:
        if not is_port_taken(address):
            continue
        holder = find_holder(address.port)
        file = settings.run_dir / f"{name}-{address.port}.pid"
        launcher, pid, is_ours = _recorded(name, address, file, holder)
        is_led = launcher is not None and "litellm" in command_of(launcher)
        if is_ours and is_led:
            text = f"{name} of this project runs on {address.port}"
            yield Finding("ports", "ok", text)
        elif is_ours and pid is not None:
            text = f"a {name} of an earlier run still holds port {address.port}"

            def fix(pid: int = pid) -> None:
                os.kill(pid, signal.SIGTERM)

            yield Finding("ports", "warn", text, f"kill {pid}", fix)
        else:
            text = f"port {address.port}, wanted for {name}, is held by {holder}"
            mend = f"stop it, or start with {flag} {_other(address)}"
            yield Finding("ports", "bad", text, mend)


def _recorded(
    name: str, address: Address, file: Path, holder: Holder
) -> tuple[int | None, int | None, bool]:
    """The launcher and the server that a pid file names, and whether that is ours."""
    if not file.exists():
        return None, None, False
    record = PidFile(file)
    try:
        is_ours = Claim(name, address, record).is_ours(holder)
        return record.launcher(), record.read(), is_ours
    finally:
        record.close()


def _other(address: Address) -> int:
    for port in range(address.port + 1, address.port + 100):
        if not is_port_taken(Address(address.host, port)):
            return port
    return address.port + 1


def check_running(settings: LaunchSettings) -> Iterator[Finding]:
    """Self-tests, and what reuse has cost, of a sidecar that runs."""
    key = settings.admin_token or settings.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{settings.sidecar.url}/admin/state"
    try:
        with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
            answer = client.get(url, headers=headers)
            answer.raise_for_status()
            state = answer.json()
    except (httpx.HTTPError, ValueError):
        return
    if not isinstance(state, dict) or "savings" not in state:
        return
    yield from _self_tests(state)
    yield from _reuse(state)


def _self_tests(state: dict[str, Any]) -> Iterator[Finding]:
    if failed := state.get("failed_tests"):
        text = f"the self-test failed: {', '.join(failed)}; that reuse is off"
        yield Finding("self-test", "warn", text, "mlx-sidecar selftest says more")
    elif state.get("status") == "ok":
        yield Finding("self-test", "ok", "passed, or not run (CACHE_SELFTEST)")
    else:
        text = f"the sidecar is {state.get('status')}: {state.get('reason') or ''}"
        yield Finding("self-test", "warn", text.rstrip(": "), "see its last lines")


def _reuse(state: dict[str, Any]) -> Iterator[Finding]:
    done, causes = state["savings"]["start"], state.get("causes") or []
    prompt, reused = done["prompt_tokens"], done["reused_tokens"]
    if prompt < _MIN_TOKENS:
        return
    share = reused / prompt
    text = f"{share:.0%} of prompt tokens were reused since the start"
    dearest = next((one for one in causes if one["lost"]), None)
    if share >= _LOW_RATE or dearest is None:
        yield Finding("reuse", "ok", text)
        return
    text += f"; dearest cause: {dearest['cause']}, {dearest['lost']:,} tokens"
    yield Finding("reuse", "warn", text, "litellm-mlx admin, panel Why not warm")
