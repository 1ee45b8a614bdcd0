"""Permutations of 4-bit codes against plain indexing."""

from __future__ import annotations

import numpy as np
import pytest

from rimuru_models.quantization.nibbles import transpose_words, unpack_nibbles, write_nibbles


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("columns", [1, 2, 5, 31, 32, 33, 63, 64, 65, 127, 128, 200, 2047])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_page_has_each_code_in_its_place_and_zeros_behind(rows: int, columns: int) -> None:
    source = random_bytes(rows, -(-columns // 8) * 4)
    out = np.full((rows, -(-columns // 64) * 32), 255, np.uint8)
    write_nibbles(source, columns, out)
    codes = np.zeros((rows, out.shape[1] * 2), np.uint8)
    for column in range(columns):
        codes[:, column] = source[:, column // 2] >> 4 * (column % 2) & 15
    for place in range(out.shape[1]):
        block, within = divmod(place, 32)
        assert np.array_equal(out[:, place] & 15, codes[:, 64 * block + within])
        assert np.array_equal(out[:, place] >> 4, codes[:, 64 * block + 32 + within])


def test_a_source_that_is_no_multiple_of_a_word_apart(rows: int = 5, columns: int = 96) -> None:
    """Files may be misaligned: a tensor can begin at any byte."""
    raw = random_bytes(1 + rows * columns // 2)
    moved = raw[1:].reshape(rows, -1)
    one, other = (np.empty((rows, 64), np.uint8) for _ in range(2))
    write_nibbles(moved, columns, one)
    write_nibbles(moved.copy(), columns, other)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("inputs", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_words_turned_over(inputs: int, order: tuple[int, ...]) -> None:
    words = random_bytes(inputs, 12).view(np.int32)
    before = words.copy()
    rows = transpose_words(words, order)
    assert np.array_equal(words, before)
    assert rows.shape == (24, -(-inputs // 8) * 4)
    codes = unpack_nibbles(rows, rows.shape[1] * 2)
    assert not codes[:, inputs:].any()
    for word in range(3):
        for place, output in enumerate(order):
            expected = (words[:, word].view(np.uint32) >> np.uint32(4 * place)) & 15
            assert np.array_equal(codes[8 * word + output, :inputs], expected)
