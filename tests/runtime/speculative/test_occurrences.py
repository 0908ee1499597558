import numpy as np
import pytest

from octavo.runtime.speculative.occurrences import MAX_PLACES, Occurrences


@pytest.mark.parametrize("width", [1, 2, 3])
def test_places_are_all_that_a_search_finds(width: int, seed: int = 2) -> None:
    random = np.random.default_rng(seed)
    text: list[int] = []
    index = Occurrences(text, width)
    for _ in range(40):
        text += random.integers(0, 3, int(random.integers(1, 4))).tolist()
        index.extend()
        assert index.continues(text)
        tail = text[-6:]
        if len(tail) < width:
            assert list(index.places(tail)) == []
            continue
        ends = [end for end in range(width, len(text)) if text[end - width : end] == tail[-width:]]
        assert list(index.places(tail)) == ends[::-1][:MAX_PLACES]
        for end in ends[:5]:
            length = next(
                i for i in range(len(text) + 1) if i >= end or i >= 6 or text[end - 1 - i] != tail[-1 - i]
            )
            assert index.match_len(tail, end, 99) == min(length, len(tail))
            assert index.match_len(tail, end, 2) == min(length, 2)


def test_another_text_is_told_from_the_same_with_more() -> None:
    text = [1, 2, 3, 4]
    index = Occurrences(text, 2)
    index.extend()
    text.append(5)
    assert index.continues(text)
    assert not index.continues(list(text))
    text[2:] = [3, 5, 5]
    assert not index.continues(text)
    text[2:] = [3]
    assert not index.continues(text)


def test_work_on_a_text_of_one_token_is_bounded() -> None:
    index = Occurrences([7] * 5000, 2)
    index.extend()
    assert len(list(index.places([7, 7]))) == MAX_PLACES
