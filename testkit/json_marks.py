"""JSON values, and how many marks stand before values in their text."""

from typing import Any

from hypothesis import strategies as st

TEXT = st.text(alphabet='\\"[]{},:ab \u00e9\n')
JSON = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=30,
)


def num_marks(value: Any) -> int:
    """Opening brackets, commas and colons of a value as JSON, less those in strings."""
    if isinstance(value, dict):
        inner = sum(map(num_marks, value.values()))
        return 1 + max(0, 2 * len(value) - 1) + inner
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(num_marks, value))
    return 0
