"""The provider's three settings and their sources."""

import pytest

from litellm_mlx.settings import Settings, read_settings


def test_defaults() -> None:
    """Nothing set, or set to nothing: the defaults."""
    assert read_settings({}) == Settings("http://127.0.0.1:8080/v1", None, 1200)
    assert read_settings({"MLX_PORT": " ", "MLX_API_KEY": ""}) == read_settings({})


@pytest.mark.parametrize(
    ("environ", "api_base"),
    [
        ({"MLX_PORT": "9000"}, "http://127.0.0.1:9000/v1"),
        ({"MLX_SERVER_PORT": "9001"}, "http://127.0.0.1:9001/v1"),
        ({"MLX_PORT": "9000", "MLX_SERVER_PORT": "1"}, "http://127.0.0.1:9000/v1"),
        ({"MLX_PORT": "0"}, "http://127.0.0.1:8080/v1"),
        ({"MLX_HOST": "10.0.0.7"}, "http://10.0.0.7:8080/v1"),
        ({"MLX_HOST": "0.0.0.0"}, "http://127.0.0.1:8080/v1"),
        ({"MLX_HOST": "::"}, "http://[::1]:8080/v1"),
    ],
)
def test_the_place_follows_the_sidecars_bind(
    environ: dict[str, str], api_base: str
) -> None:
    """A wildcard address is reached over loopback."""
    assert read_settings(environ).api_base == api_base


def test_the_key_and_the_time_limit() -> None:
    """Under their own names and under the general alias."""
    settings = read_settings(
        {"MLX_SERVER_MLX_API_KEY": "k", "PROXY_REQUEST_TIMEOUT_SECONDS": "9.5"}
    )
    assert (settings.api_key, settings.request_timeout_s) == ("k", 9.5)


@pytest.mark.parametrize("value", ["-1", "soon", "nan", "1e9"])
@pytest.mark.parametrize("name", ["MLX_PORT", "PROXY_REQUEST_TIMEOUT_SECONDS"])
def test_a_bad_value_names_its_variable_and_range(name: str, value: str) -> None:
    """Nobody finds out by a strange timeout later."""
    with pytest.raises(ValueError, match=rf"{name} must be [01]\.\."):
        read_settings({name: value})
