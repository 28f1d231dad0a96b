"""Hypothesis strategies for what a JSON file may hold: any value, and a sound one with some things wrong."""

import copy

from hypothesis import strategies as st

USUAL_SUSPECTS = (
    0,
    -1,
    1,
    1 << 31,
    1 << 63,
    10**12,
    1.0,
    3.5,
    -0.0,
    1e308,
    True,
    False,
    None,
    "",
    "1",
    "yarn",
    "\x1b[2J",
)
SCALARS = (
    st.sampled_from(USUAL_SUSPECTS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


@st.composite
def damaged(draw, sound):
    """`sound` with up to four things wrong, at any depth: a value replaced, a name or item left out or added."""
    value = copy.deepcopy(sound)
    for _ in range(draw(st.integers(0, 4))):
        if not (left := places(value)):
            break
        holder, key = draw(st.sampled_from(left))
        how = draw(st.sampled_from(["replace", "leave out", "add"]))
        if how == "replace":
            holder[key] = draw(VALUES)
        elif how == "leave out":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = draw(VALUES)
        else:
            holder.insert(key, draw(VALUES))
    return value


def places(value):
    """(container, key) of everything inside a value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in places(value[key])]
