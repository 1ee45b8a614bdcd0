"""What the settings make of a model before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rimuru_cli.chat.loading import DEMO_RESIDENT_SHARE, engine_config
from rimuru_cli.hub.resolve import ResolvedModel
from rimuru_cli.output import Output
from rimuru_cli.settings import resolve


@pytest.mark.parametrize(("quant", "share"), [(None, DEMO_RESIDENT_SHARE), ("none", DEMO_RESIDENT_SHARE), ("int4", None), ("int8", None)])
def test_experts_of_the_demonstration_model_are_kept_out_unless_it_is_quantised(
    quant: str | None, share: float | None, tmp_path: Path
) -> None:
    model = ResolvedModel(name="rimuru-demo", path=tmp_path, revision=None, embedded=True)
    settings = resolve({"quant": quant, "profile": "none"}, file=tmp_path / "none.toml", environ={})
    assert engine_config(model, settings, Output()).resident_share == share
