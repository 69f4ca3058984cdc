"""No proxy of the environment sees what goes from LiteLLM to the sidecar."""

import pytest

from litellm_mlx.direct_routes import exempt

OWN = "localhost,127.0.0.1,::1"


def test_without_a_proxy_nothing_is_changed() -> None:
    environ = {"NO_PROXY": "a"}
    exempt(environ, "127.0.0.1", dict)
    assert environ == {"NO_PROXY": "a"}


@pytest.mark.parametrize("scheme", ["http", "https", "all"])
def test_this_machine_is_asked_directly(scheme: str) -> None:
    environ = {f"{scheme}_proxy": "http://proxy:1"}
    exempt(environ, "10.0.0.7", lambda: {scheme: "http://proxy:1"})
    assert environ["NO_PROXY"] == environ["no_proxy"] == f"{OWN},10.0.0.7"
    assert f"{scheme.upper()}_PROXY" not in environ


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_other_exceptions_stay(name: str) -> None:
    environ = {"HTTP_PROXY": "http://proxy:1", name: "intra.net, .corp,localhost"}
    exempt(environ, "localhost", lambda: {"http": "http://proxy:1"})
    assert environ["no_proxy"] == "intra.net,.corp,localhost,127.0.0.1,::1"


def test_what_the_system_says_is_not_lost() -> None:
    """macOS: with NO_PROXY set, Python asks the environment alone."""
    environ: dict[str, str] = {}
    exempt(environ, "::1", lambda: {"https": "http://office:3128"})
    assert environ == {
        "HTTPS_PROXY": "http://office:3128", "NO_PROXY": OWN, "no_proxy": OWN,
    }  # fmt: skip
