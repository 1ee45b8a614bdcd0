"""Top-k gating against its formula in float64, and its ties."""

from __future__ import annotations

import pytest
import torch

from rimuru_kernels.topk_gating import topk_gating


def by_hand(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[list[list[float]], list[list[int]]]:
    weights, ids = [], []
    for row in torch.softmax(logits.double(), -1).tolist():
        chosen = sorted(sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k])
        total = sum(row[expert] for expert in chosen) if renormalize else 1.0
        ids.append(chosen)
        weights.append([row[expert] / total for expert in chosen])
    return weights, ids


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (1, 32, 20), (1, 8, 8), (70, 4, 2), (33, 128, 8), (5, 60, 59)])
def test_formula(tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits = torch.randn(tokens, experts) * 2
    weights, ids = topk_gating(logits, top_k, renormalize)
    expected_weights, expected_ids = by_hand(logits, top_k, renormalize)
    assert (weights.dtype, ids.dtype, weights.shape, ids.shape) == (torch.float32, torch.int64, (tokens, top_k), (tokens, top_k))
    assert ids.tolist() == expected_ids
    torch.testing.assert_close(weights.double(), torch.tensor(expected_weights, dtype=torch.float64), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3, 5, 8])
def test_ties_go_to_the_lower_expert(top_k: int) -> None:
    equal = torch.zeros(1, 8)
    assert topk_gating(equal, top_k, True)[1].tolist() == [list(range(top_k))]
    levels = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]])
    assert topk_gating(levels, top_k, True)[1].tolist() == [sorted([1, 3, 5, 7, 0, 2, 4, 6][:top_k])]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    # a tie in one row takes another path through the code; it must not change the other rows
    logits = torch.randn(40, 16)
    logits[7] = 0.0
    logits[20, 3:9] = logits[20, 3]
    weights, ids = topk_gating(logits, 4, True)
    for row in range(40):
        alone = topk_gating(logits[row : row + 1], 4, True)
        assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


def test_rows_that_cancel_out_in_the_count_of_ties() -> None:
    # equal totals must not hide a tie: every row is judged with its own border
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]])
    assert topk_gating(logits, 2, False)[1].tolist() == [[0, 1], [0, 1]]
    logits = torch.tensor([[float("nan")] * 4, [0.0, 0.0, 0.0, 0.0]])
    assert topk_gating(logits, 2, False)[1].tolist()[1] == [0, 1]


def test_half_precision_logits_and_nan_rows() -> None:
    logits = torch.randn(3, 16).bfloat16()
    assert torch.equal(topk_gating(logits, 4, True)[0], topk_gating(logits.float(), 4, True)[0])
    broken = torch.full((2, 8), float("nan"))
    broken[1] = torch.arange(8.0)
    weights, ids = topk_gating(broken, 2, True)
    assert ids.tolist()[1] == [6, 7] and int(ids.min()) >= 0 and int(ids.max()) < 8
    assert weights[0].isnan().all() and weights[1].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("logits", "top_k"), [(torch.ones(2, 4), 0), (torch.ones(2, 4), 5), (torch.ones(4), 1), (torch.ones(2, 4).int(), 1)]
)
def test_misuse_is_refused(logits: torch.Tensor, top_k: int) -> None:
    with pytest.raises(ValueError, match="topk_gating"):
        topk_gating(logits, top_k, True)
