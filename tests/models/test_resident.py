"""The oracle itself: attention against its formula in float64, experts against theirs, misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import tiny_config, write_tiny_checkpoint

from rimuru_models import attention
from rimuru_models.attention import causal_attention
from rimuru_models.config import ModelConfig
from rimuru_models.resident import ResidentExperts, ResidentKVCache
from rimuru_models.weights import CheckpointReader


def attention_by_hand(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    tokens, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    out = torch.empty_like(q, dtype=torch.float64)
    for row in range(tokens):
        position = length - tokens + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = keys[first : position + 1, group].double() @ q[row, head].double() * scale
            out[row, head] = torch.softmax(scores, 0) @ values[first : position + 1, group].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    ("tokens", "length", "heads", "kv_heads", "head_dim"), [(1, 1, 1, 1, 2), (1, 9, 6, 3, 10), (5, 9, 4, 1, 8), (9, 9, 3, 3, 6)]
)
def test_attention(
    tokens: int, length: int, heads: int, kv_heads: int, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(tokens, heads + 2, head_dim)[:, 1:-1]  # a view, as the model passes it
    keys, values = torch.randn(2, length, kv_heads, head_dim)
    expected = attention_by_hand(q, keys, values, 0.3, window)
    for limit in (1 << 24, 1, 2 * heads * length):  # whole, row by row, two rows at a time
        monkeypatch.setattr(attention, "_MAX_SCORES", limit)
        actual = causal_attention(q, keys, values, scale=0.3, sliding_window=window)
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def test_attention_refuses_shapes_that_do_not_fit() -> None:
    q, keys = torch.randn(2, 4, 8), torch.randn(5, 2, 8)
    for bad_q, bad_keys, bad_values in [(q, keys, keys[:4]), (q, keys[:1], keys[:1]), (q[:, :3], keys, keys), (q[..., :6], keys, keys)]:
        with pytest.raises(ValueError, match="do not go together"):
            causal_attention(bad_q, bad_keys, bad_values, scale=1.0)


def test_experts_follow_the_formula(tmp_path: Path) -> None:
    reader = CheckpointReader(write_tiny_checkpoint(tmp_path, "qwen3_moe"))
    experts = ResidentExperts(reader)
    x = torch.randn(7, 64)
    ids = torch.stack([torch.randperm(8)[:3].sort().values for _ in range(7)])
    weights = torch.rand(7, 3)
    expected = torch.zeros(7, 64, dtype=torch.float64)
    for row in range(7):
        for slot in range(3):
            gate, up, down = (tensor.double() for tensor in reader.expert(2, int(ids[row, slot])))
            inner = torch.nn.functional.silu(gate @ x[row].double()) * (up @ x[row].double())
            expected[row] += weights[row, slot].double() * (down @ inner)
    kept = x.clone()
    actual = experts.forward(2, x, ids, weights)
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(x, kept), "the input belongs to the caller"
    assert torch.equal(experts.forward(2, x, ids, weights), actual)


def test_cache_counts_rows_of_every_sequence() -> None:
    config = ModelConfig.from_dict(tiny_config("mixtral", num_layers=1))
    kv = ResidentKVCache(config, num_sequences=2)
    q, k = torch.randn(5, 4, 24), torch.randn(5, 2, 24)
    with pytest.raises(ValueError, match="begin_step"):
        kv.attend(0, q, k, k, scale=1.0, sliding_window=None)
    with pytest.raises(ValueError, match="need 2 row counts"):
        kv.begin_step([5])
    kv.begin_step([3, 1])
    with pytest.raises(ValueError, match="announced 4 rows, the step has 5"):
        kv.attend(0, q, k, k, scale=1.0, sliding_window=None)
    kv.begin_step([3, 2])
    kv.attend(0, q, k, k, scale=1.0, sliding_window=None)
    assert (kv.length(0), kv.length(1)) == (3, 2)
    assert kv.positions([1, 2]).tolist() == [3, 2, 3]


def test_the_same_model_in_other_dtypes(tmp_path: Path, resident_run: Any) -> None:
    folder = write_tiny_checkpoint(tmp_path, "qwen2_moe")
    tokens = torch.arange(40)
    single = resident_run(folder).run(tokens, [39, 1])
    double = resident_run(folder, dtype=torch.float64).run(tokens, [39, 1])
    assert (single - double).abs().max() < 1e-4
    half = resident_run(folder, dtype=torch.bfloat16).step(tokens)
    assert half.dtype == torch.float32
    # rounding may send a token to another expert, so only most of the ranking is kept
    assert torch.nn.functional.cosine_similarity(half, single, dim=-1).median() > 0.95
