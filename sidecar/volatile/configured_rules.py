"""The rules of values that change, as the settings choose them."""

from pathlib import Path

from sidecar.config.settings import Config
from sidecar.config.sources import ConfigError
from sidecar.volatile.rules import RuleError, RuleSet, load_rules


def configured_rules(config: Config) -> RuleSet:
    """
    Before a model is loaded: minutes later is late for a wrong file name.

    Raises:
        ConfigError: names the setting, and says why.
    """
    name = config.cache.rules_file
    file = Path(name) if name else None
    try:
        rules = load_rules(file)
    except RuleError as error:
        source = f"CACHE_RULES_FILE={name}" if name else "the built-in rules"
        raise ConfigError(f"{source}: {error}") from error
    if not config.cache.pin_policy:
        return rules
    try:
        return load_rules(file, config.cache.pin_policy)
    except RuleError as error:
        raise ConfigError(f"CACHE_PIN_POLICY: {error}") from error
