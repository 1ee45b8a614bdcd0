"""What the prompt test measures: prompts that are read from their first token on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rimuru_cli.bench.tokens import SyntheticModel, measure_prompt


def test_no_prompt_begins_with_one_that_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SyntheticModel("tiny", torch.device("cpu"), lambda *_: None, dtype=torch.float32)
    engine, parts = model.engine(None)
    requests = []
    submit = engine.submit

    def noted(*args: Any, **words: Any) -> Any:
        requests.append(submit(*args, **words))
        return requests[-1]

    monkeypatch.setattr(engine, "submit", noted)
    with engine:
        for tokens in (64, 32, 128):
            measure_prompt(engine, parts, tokens, repeats=1)
    model.host.shared = False
    model.host.close()
    assert [request.timings.cached_tokens for request in requests] == [0] * 6
