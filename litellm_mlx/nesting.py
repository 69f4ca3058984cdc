"""How deep values of a client's body are nested."""


def is_deeper(value: object, num_levels: int) -> bool:
    """Whether a value holds others on more levels, counting its own."""
    level: list[object] = [value]
    for _ in range(num_levels):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)
