"""Small pictures of an engine between two steps, for its callers: see `Snapshot` and `Tally`."""

from __future__ import annotations

from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.stats import Snapshot, Tally
from rimuru_cli.engine.telemetry.collect import Watched


def snapshot_of(engine: Watched) -> Snapshot:
    """The pool's composition and the counters right now."""
    parts, scheduler, work, info = engine.parts, engine.scheduler, engine.work, engine.info()
    residency, experts, allocator = parts.residency, parts.experts, parts.pool.allocator
    owned = {kind.value: size for kind, size in allocator.bytes_by_kind().items()}
    buffers = parts.buffers.num_pages * parts.plan.geometry.expert_page_bytes
    owned["expert"] = owned.get("expert", 0) - buffers
    owned["buffer"] = buffers
    return Snapshot(
        step=work.steps,
        memory_bytes=parts.plan.ceiling,
        pool_bytes=parts.plan.pool,
        withheld_bytes=max(0, parts.pool.committed_bytes - parts.plan.pool) if parts.pool.why_kept else 0,
        free_bytes=allocator.free_bytes,
        tail_bytes=allocator.tail_bytes,
        bytes_by_kind=owned,
        cached_kv_bytes=parts.blocks.idle_pages * parts.plan.geometry.kv_page_bytes,
        resident_experts=residency.num_resident,
        total_experts=residency.total,
        resident_by_layer=tuple(residency.counts),
        expert_uses=experts.uses,
        expert_hits=experts.hits,
        expert_bytes_read=parts.host.bytes_read,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        context_tokens=sum(len(sequence.tokens) for sequence in (*scheduler.running, *scheduler.waiting)),
        preemptions=scheduler.preemptions,
        pinned_bytes=info.pinned_bytes,
        mapped_bytes=info.mapped_bytes,
        host_brought=parts.host.brought,
        elastic_bytes=work.elastic_bytes,
        elastic_seconds=work.elastic_seconds,
        states_not_kept=0 if parts.recurrent is None else parts.recurrent.room.skipped,
        events=tuple(engine.events),
    )


def tally_of(engine: Watched) -> Tally:
    """What a snapshot says that changes with every step, at a tenth of the cost."""
    parts, scheduler, work, allocator = engine.parts, engine.scheduler, engine.work, engine.parts.pool.allocator
    owned = {} if parts.recurrent is None else allocator.bytes_by_kind()
    return Tally(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preemptions=scheduler.preemptions,
        prefill_rows=work.prefill_tokens,
        decode_rows=work.decode_tokens,
        uses=parts.experts.uses,
        hits=parts.experts.hits,
        link_bytes=parts.host.bytes_read + parts.experts.fetched_bytes,
        resident=parts.residency.num_resident,
        kv_bytes=allocator.owned(PageKind.KV) * parts.plan.geometry.kv_page_bytes,
        state_bytes=sum(owned.get(kind, 0) for kind in (PageKind.SSM, PageKind.CONV)),
        buffer_bytes=parts.buffers.num_pages * parts.plan.geometry.expert_page_bytes,
        free_bytes=allocator.free_bytes,
    )
