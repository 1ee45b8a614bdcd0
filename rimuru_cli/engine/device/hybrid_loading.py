"""What an engine on a device has besides for a model with recurrent layers."""

from __future__ import annotations

import torch

from rimuru_cli.engine.bookmarks import Bookmarks
from rimuru_cli.engine.device.hybrid_plan import undo_sequences
from rimuru_cli.engine.device.plan import DevicePlan
from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.device.states import DeviceStates
from rimuru_cli.engine.device.streaming import ScratchPages
from rimuru_cli.engine.device.undo import Undo
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import ConvView, SSMView
from rimuru_cli.engine.parts import Recurrent
from rimuru_cli.engine.room import Room
from rimuru_cli.engine.state_blocks import StateBlocks
from rimuru_models.config import ModelConfig


def recurrent_parts(
    model: ModelConfig,
    plan: DevicePlan,
    pool: PagePool,
    blocks: KVBlocks,
    residency: DeviceResidency,
    scratch: ScratchPages,
    dtype: torch.dtype,
    *,
    max_sequences: int,
) -> tuple[Recurrent | None, DeviceStates | None]:
    """Who owns states and bookmarks, and what the model sees of them; nothing for a model without recurrent layers."""
    mixer, layout = model.recurrent, plan.division.states
    if mixer is None or layout is None:
        return None, None
    device = pool.data.device
    ssm, conv = SSMView(pool, mixer.state_shape), ConvView(pool, mixer.channels, mixer.conv_rows, dtype)
    states = StateBlocks(pool, model.recurrent_layers, ssm, conv, layout)
    bookmarks = Bookmarks(states, blocks)
    room = Room(plan.division, pool, blocks, states, bookmarks, residency, scratch, plan.floor_pages)
    undo = Undo(
        states,
        mixer.state_shape,
        (mixer.conv_rows, mixer.channels),
        sequences=undo_sequences(model, dtype.itemsize, max_sequences),
        dtype=dtype,
        device=device,
    )
    return Recurrent(states, bookmarks, room), DeviceStates(states, pool.data, dtype, max_sequences=max_sequences, undo=undo)
