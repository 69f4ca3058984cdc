"""One LiteLLM proxy over two sidecars: the built-in model and a scripted one."""

from collections.abc import Iterator

import pytest

from sidecar.app import App
from testkit.proxy import Proxy, running_proxy
from testkit.scripted import Switch, scripted
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model


@pytest.fixture(scope="session")
def switch() -> Switch:
    """What the scripted model says; a test sets its `script`."""
    return Switch()


@pytest.fixture(scope="module", autouse=True)
def _nothing_scripted(switch: Switch) -> None:
    """A file's tests do not hang on what another file's have had it say."""
    switch.script = Switch().script


@pytest.fixture(scope="session")
def scripted_sidecar(
    switch: Switch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    """
    A model whose answers the `switch` decides; `local` in the proxy.

    One layer, because then a prefill computes no attention: 20,000 tokens take 0.1 s.
    """
    folder = tmp_path_factory.mktemp("scripted") / "scripted-dense"
    model = make_model(folder, "dense", layers=1, hidden=32)
    with running_sidecar({"MODEL_PATH": str(model)}, scripted(switch)) as app:
        yield app


@pytest.fixture(scope="session")
def proxy(
    scripted_sidecar: App,
    app: App,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxy]:
    """The proxy in front of both; the built-in model is `builtin` there."""
    folder = tmp_path_factory.mktemp("proxy")
    more = {"builtin": app.url}
    with running_proxy(scripted_sidecar.url, folder, more=more) as proxy:
        yield proxy
