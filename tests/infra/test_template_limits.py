"""What a chat template may compute."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sidecar.infra.template_limits import limit_templates

MESSAGES = [{"role": "user", "content": "hi"}]


def rendered(template: str) -> str:
    """As transformers renders it."""
    limit_templates()
    environment = ImmutableSandboxedEnvironment()
    return environment.from_string(template).render(messages=MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ (7**(10**(messages|length + 7)))|string|length }}x",
        "{{ 2**(10**9) }}",
        "{{ 'x' * (10**9 * messages|length) }}",
        "{{ (10**9) * 'x' }}",
        "{{ ([0] * 10**8)|length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%s %-.300000000f' % ('a', 1) }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%(a)300000000d' % {'a': 1} }}",
        "{{ ('%(' * 4000000) % 1 }}",
        "{% set ns = namespace(n=7) %}{% for i in range(40) %}"
        "{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n % 10 }}",
    ],
)
def test_what_would_hold_the_process_is_refused(template: str) -> None:
    with pytest.raises(OverflowError, match="a chat template asks for too"):
        rendered(template)


def test_all_else_is_computed_as_ever() -> None:
    assert (
        rendered("{{ '%-12s|%05.2f|100%%' % ('a', 2) }}") == "a           |02.00|100%"
    )
    assert rendered("{{ '%d%% 12345' % 3 }}") == "3% 12345"
    assert rendered("{{ '%(12345)s' % {'12345': 'a'} }}") == "a"
    assert rendered("{{ 7 % 4 }}{{ '%d' % 12345 }}") == "312345"
    said = "{{ 2**10 }} {{ 3 * 4 }} {{ '-' * 3 }} {{ 2.0**0.5 > 1.4 }} {{ 3 * [1] }}"
    assert rendered(said) == "1024 12 --- True [1, 1, 1]"
