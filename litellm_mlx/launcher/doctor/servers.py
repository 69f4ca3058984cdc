"""Who holds the ports, and what the running servers say of themselves."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
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
    is_stopped,
)
from litellm_mlx.launcher.running import running_ports
from litellm_mlx.launcher.settings import Address, LaunchSettings

_TIMEOUT_S = 3.0
_MIN_TOKENS = 10_000  # before a rate says something
_LOW_RATE = 0.5
_REFUSED = (401, 403)


def check_ports(settings: LaunchSettings) -> Iterator[Finding]:
    """Free, ours, left over, or a stranger's."""
    wanted = [("sidecar", settings.sidecar, "--port")]
    if settings.proxy is not None:
        wanted.append(("litellm", settings.proxy, "--proxy-port"))
    running: list[tuple[str, int | None]] = []
    silent = []
    for name, address, flag in wanted:
        if not is_port_taken(address):
            silent.append((name, address))
            continue
        holder = find_holder(address.port)
        launcher, pid, is_ours = _recorded(name, address, settings, holder)
        if is_ours and _leads(launcher):
            running.append((name, launcher))
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

    yield from _stopped(launcher for _, launcher in running)
    if not any(name == "sidecar" for name, _ in running):
        yield from _elsewhere(settings)
    for name, address in silent if running else ():
        own, launcher = running[0]
        if _recorded(name, address, settings, None)[0] != launcher:
            continue  # it was started without
        text = f"{own} runs, and {name} does not listen on {address.port}"
        mend = "wait for its start; litellm-mlx logs says why, if it does not come"
        yield Finding("ports", "warn", text, mend)


def _stopped(launchers: Iterable[int | None]) -> Iterator[Finding]:
    """Of launchers that Ctrl-Z stopped: what they watch over answers still."""
    for launcher in dict.fromkeys(launchers):
        if launcher is not None and is_stopped(launcher):
            text = f"the launcher, pid {launcher}, is stopped: no server comes back"
            mend = f"fg in its terminal, or kill -CONT {launcher}"
            yield Finding("ports", "bad", text, mend)


def _elsewhere(settings: LaunchSettings) -> Iterator[Finding]:
    """Of starts that are not where the settings have this one."""
    for port in running_ports(settings, "sidecar"):
        if port != settings.sidecar.port:
            text = (
                f"a sidecar of this project runs on {port}, and the settings say "
                f"{settings.sidecar.port}"
            )
            mend = f"start again, or set MLX_PORT={port} in .env"
            yield Finding("ports", "warn", text, mend)


def _leads(launcher: int | None) -> bool:
    """Whether the launcher that a pid file names lives."""
    return launcher is not None and "litellm" in command_of(launcher)


def _is_led(name: str, address: Address, settings: LaunchSettings) -> bool:
    """Whether a server of ours, whose launcher lives, holds a port."""
    if not is_port_taken(address):
        return False
    holder = find_holder(address.port)
    launcher, _, is_ours = _recorded(name, address, settings, holder)
    return is_ours and _leads(launcher)


def _recorded(
    name: str, address: Address, settings: LaunchSettings, holder: Holder | None
) -> tuple[int | None, int | None, bool]:
    """The launcher and the server that a pid file names, and whether that is ours."""
    file = settings.run_dir / f"{name}-{address.port}.pid"
    if not file.exists():
        return None, None, False
    record = PidFile(file)
    try:
        is_ours = holder is not None and Claim(name, address, record).is_ours(holder)
        return record.launcher(), record.read(), is_ours
    finally:
        record.close()


def _other(address: Address) -> int:
    for port in range(address.port + 1, address.port + 100):
        if not is_port_taken(Address(address.host, port)):
            return port
    return address.port + 1


def check_running(settings: LaunchSettings) -> Iterator[Finding]:
    """Keys, self-tests, and what reuse has cost, of servers that run."""
    yield from _of_litellm(settings)
    yield from _of_sidecars_key(settings)
    key = settings.admin_token or settings.api_key
    url = f"{settings.sidecar.url}/admin/state"
    try:
        answer = _asked(url, key)
        if answer.status_code in _REFUSED:
            yield from _unknown_token(settings)
        answer.raise_for_status()
        state = answer.json()
    except httpx.TimeoutException:
        if _is_led("sidecar", settings.sidecar, settings):
            yield _frozen("sidecar", settings.sidecar)
        return
    except (httpx.HTTPError, ValueError):
        return
    if not isinstance(state, dict) or "savings" not in state:
        return
    yield from _self_tests(state)
    yield from _reuse(state)


def _of_litellm(settings: LaunchSettings) -> Iterator[Finding]:
    address = settings.proxy
    if address is None or not _is_led("litellm", address, settings):
        return
    try:
        answer = _asked(f"{address.url}/v1/models", settings.master_key)
    except httpx.TimeoutException:
        yield _frozen("litellm", address)
        return
    except httpx.HTTPError:
        return
    if answer.status_code in _REFUSED:
        yield _wrong_key("litellm", address, "LITELLM_MASTER_KEY")


def _of_sidecars_key(settings: LaunchSettings) -> Iterator[Finding]:
    """Whether the key that LiteLLM and clients are given is the running sidecar's."""
    with contextlib.suppress(httpx.HTTPError):
        answer = _asked(f"{settings.sidecar.url}/v1/models", settings.api_key)
        is_ours = "x-request-id" in answer.headers
        if answer.status_code in _REFUSED and is_ours:
            yield _wrong_key("sidecar", settings.sidecar, "MLX_API_KEY")


def _unknown_token(settings: LaunchSettings) -> Iterator[Finding]:
    """What the running sidecar's /admin says no to, beside a key that is right."""
    if settings.admin_token:
        yield _wrong_key("sidecar", settings.sidecar, "ADMIN_TOKEN")
        return
    port = settings.sidecar.port
    text = f"the sidecar that runs on {port} wants an ADMIN_TOKEN, and none is set"
    with contextlib.suppress(httpx.HTTPError):
        models = _asked(f"{settings.sidecar.url}/v1/models", settings.api_key)
        if models.is_success and "x-request-id" in models.headers:
            yield Finding("keys", "bad", text, "set it in .env, or start again")


def _asked(url: str, key: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        return client.get(url, headers=headers)


def _wrong_key(name: str, address: Address, setting: str) -> Finding:
    text = f"{setting} is not the key of the {name} that runs on {address.port}"
    return Finding("keys", "bad", text, "correct it in .env, or start again")


def _frozen(name: str, address: Address) -> Finding:
    text = f"{name} on {address.port} does not answer within {_TIMEOUT_S:g} s"
    return Finding("ports", "bad", text, "litellm-mlx stop, then start again")


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
