"""The bounded store of keys and values: what it forgets, and what it refuses."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.scheduler.server.key_value_store import KeyValueStore, StoreFull


def test_what_was_just_put_is_there_and_the_oldest_other_room_is_not() -> None:
    store = KeyValueStore(max_bytes=10)
    for key in ("old/a", "new/a", "old/b"):
        store.put(key, b"xxx")
    assert store.put("old/c", b"xxx") == []
    assert store.get(("old/a", "old/b", "old/c", "new/a")) == (b"xxx", b"xxx", b"xxx", None)
    with pytest.raises(StoreFull, match=r"room old, .* 12 bytes under 4 keys; at most 10 bytes under"):
        store.put("old/d", b"xxx")
    assert store.get(("old/d",)) == (None,)
    store.put("old/c", b"xxxx")
    assert store.add("new/sum", 7, (b"0.0", 1)) == (7, [])
    assert store.get(("old/a", "new/sum")) == (None, b"7")


@pytest.mark.parametrize("value", [b"x", b"-", b"1.5", b"9" * 5000])
def test_nothing_is_added_to_what_is_no_number_of_64_bits(value: bytes) -> None:
    store = KeyValueStore()
    store.put("a/n", value)
    with pytest.raises(StoreFull, match="1 more at a/n, which has no number, or one that would be beyond 64 bits"):
        store.add("a/n", 1, (b"0.0", 1))
    assert store.get(("a/n",)) == (value,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 6)), max_size=40))
def test_it_never_holds_more_than_it_may(puts: list[tuple[str, int, int]]) -> None:
    """And answers who waits for a key that is put."""
    store = KeyValueStore(max_bytes=12, max_keys=4)
    for number, (room, name, size) in enumerate(puts):
        key = f"{room}/{name}"
        known, waits = store.get((key,)), False
        with suppress(StoreFull):  # as many wait already as may
            waits = store.wait((b"0.0", number), (key,), 0.0) is None
        try:
            answered = store.put(key, b"x" * size)
        except StoreFull:
            assert store.get((key,)) == known, "nothing has changed"
        else:
            assert store.get((key,)) == (b"x" * size,)
            assert ((b"0.0", number) in dict(answered)) == waits
        held = store.get([f"{room}/{name}" for room in "abc" for name in range(4)])
        assert sum(value is not None for value in held) <= 4
        assert sum(len(value or b"") for value in held) <= 12
