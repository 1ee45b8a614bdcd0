"""Changing the memory ceiling while an engine runs: the pool's end is given back, or taken again, between two steps.

Lowering: the best-ranked experts that fit stay, whatever lies beyond the new end moves below it, the rest of the experts is retired, and
the memory behind the emptied pages goes back to the driver or the system. Blocks that are kept only for reuse stay as long as experts above
their floor can make room. Text never changes: experts and keys are the same bytes wherever they lie.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rimuru_cli.engine.describe import context_notices, context_reason
from rimuru_cli.engine.memory.allocator import MAX_POOL_BYTES
from rimuru_cli.engine.memory.division import Wanted
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind
from rimuru_models.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from rimuru_cli.engine.config import EngineConfig, MemoryPlan
    from rimuru_cli.engine.device.plan import DevicePlan
    from rimuru_cli.engine.parts import Parts, Recurrent
    from rimuru_cli.engine.stats import EngineInfo

MIB = 1 << 20

_KEPT = "The lower ceiling keeps memory from use without giving it back"


@dataclass(frozen=True)
class MemoryChange:
    """What a new ceiling changed. Bytes; times are seconds.

    Attributes:
        memory_before, memory_bytes: the ceiling before and now.
        pool_before, pool_bytes: the pool before and now.
        returned_bytes: given back to the driver or the system; 0 where that cannot be done (`info.notices` says so) or the pool grew.
        taken_bytes: taken from it.
        retired_experts: experts that had to go; experts come by themselves where there is more room.
        moved_bytes: contents that moved to lower addresses.
        evicted_tokens: tokens that were kept only for reuse and will have to be computed again.
        context_limit: most tokens a sequence can have now.
        seconds: how long no step could run.
    """

    memory_before: int
    memory_bytes: int
    pool_before: int
    pool_bytes: int
    returned_bytes: int
    taken_bytes: int
    retired_experts: int
    moved_bytes: int
    evicted_tokens: int
    context_limit: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return asdict(self)

    def summary(self) -> str:
        """What happened, in one sentence."""
        moves = [
            f"{_mib(self.returned_bytes)} given back" if self.returned_bytes else "",
            f"{_mib(self.taken_bytes)} taken" if self.taken_bytes else "",
            f"{self.retired_experts:,} experts retired" if self.retired_experts else "",
            f"{self.evicted_tokens:,} tokens kept for reuse dropped" if self.evicted_tokens else "",
        ]
        details = ", ".join(move for move in moves if move)
        return f"The memory ceiling is {_mib(self.memory_bytes)} now" + (f": {details}." if details else ".")


@dataclass(frozen=True)
class Running:
    """What must go on under a new ceiling.

    Attributes:
        kv_pages: KV pages that sequences hold.
        tokens: context that the longest of them needs by itself.
        states: sequences that hold states, in a model with recurrent layers.
    """

    kv_pages: int
    tokens: int
    states: int = 0


def reserve_for(plan: MemoryPlan | DevicePlan, machine_bytes: int) -> int:
    """The largest pool that a machine of so many bytes can ever make use of, whole huge pages; addresses are reserved for it."""
    huge = plan.geometry.huge_page_bytes
    return max(plan.pool, min(plan.most_pool, machine_bytes, MAX_POOL_BYTES) // huge * huge)


def replan(parts: Parts, config: EngineConfig, ceiling: int, running: Running) -> MemoryPlan | DevicePlan:
    """The division of a new ceiling.

    Raises:
        UsageError: it is not a positive number of bytes.
        DoesNotFitError: it is too small for the model or for what runs (says the least that is enough), or the machine has less.
    """
    if ceiling <= 0:
        raise UsageError(f"A memory ceiling must be a positive number of bytes, not {ceiling}.", hint="For example: 12GiB")
    least = least_ceiling(parts, config, running)
    if ceiling < least:
        active = running.tokens > 0
        who = "What is running needs" if active else "The model needs"
        hint = f"Give at least {-(-least // MIB)}MiB" + (", or stop what is running first." if active else ".")
        raise DoesNotFitError(
            f"{who} a memory ceiling of at least {-(-least // MIB):,} MiB, and {_mib(ceiling)} were asked for; nothing has changed.",
            hint=hint,
        )
    plan = parts.replan(replace(config, memory_bytes=ceiling, pool_bytes=None, resident_share=None))
    if plan.pool > parts.pool.reserve_bytes:
        # The rest of such a ceiling stays unused.
        pool = parts.pool.reserve_bytes
        plan = replace(parts.replan(replace(config, memory_bytes=None, resident_share=None, pool_bytes=pool)), ceiling=ceiling)
    more, free = plan.pool - parts.pool.num_bytes, _free_bytes(parts)
    if more > free:
        raise DoesNotFitError(
            f"A ceiling of {_mib(ceiling)} takes {_mib(more)} more, and only {_mib(free)} are free; nothing has changed.",
            hint="Close other programs, or give less.",
        )
    return plan


def least_ceiling(parts: Parts, config: EngineConfig, running: Running) -> int:
    """The smallest ceiling under which the model and all that runs now goes on."""
    huge = parts.plan.geometry.huge_page_bytes
    pages = max(running.kv_pages, parts.blocks.blocks_for(running.tokens) * parts.blocks.num_layers)

    def plan_of(number: int) -> MemoryPlan | DevicePlan:
        return parts.replan(replace(config, memory_bytes=None, resident_share=None, pool_bytes=number * huge))

    def enough(plan: MemoryPlan | DevicePlan) -> bool:
        kv_pages = plan.kv_pages
        if running.states > 1:
            kv_pages = plan.division.kv_pages(plan.pool // huge, plan.floor_pages, running.states)
        return kv_pages >= pages and plan.context >= running.tokens

    low, high = 0, parts.pool.num_bytes // huge
    while low < high:
        middle = (low + high) // 2
        if enough(plan_of(middle)):
            high = middle
        else:
            low = middle + 1
    return plan_of(low).ceiling


def shrink_pool(parts: Parts, pool_bytes: int) -> tuple[int, int, int, int]:
    """Empty the pool beyond `pool_bytes` and give that memory back. Only between steps.

    Returns:
        experts retired, bytes moved, tokens evicted, bytes given back.

    Raises:
        DoesNotFitError: pages of what runs do not fit below; nothing has moved, and experts that had been retired for it are loaded again.
    """
    pool, blocks, residency = parts.pool, parts.blocks, parts.residency
    experts = residency.num_resident
    allocator, geometry = pool.allocator, pool.geometry
    if parts.lent is not None:
        parts.lent.close()  # the next step lends them again
    pool.limit(pool_bytes)
    try:
        retired, evicted = _make_room(parts)
        residency.settle()  # only now: copies that have not begun were called back if their experts are among those that go
        kv = allocator.held_in_withheld(PageKind.KV)
        blocks.move(kv)
        states = _move_states(parts)
        moved = residency.move_from(pool_bytes // ENTRY_BYTES)
        returned = pool.shrink(pool_bytes)
    except DoesNotFitError:
        pool.limit(pool.num_bytes)
        residency.expand(experts - residency.num_resident)
        raise
    except BaseException:
        pool.limit(pool.num_bytes)
        raise
    return retired, len(kv) * geometry.kv_page_bytes + moved * geometry.expert_page_bytes + states, evicted, returned


def _move_states(parts: Parts) -> int:
    """Move sequences' states out of withheld pages; returns their bytes."""
    allocator, geometry = parts.pool.allocator, parts.pool.geometry
    if parts.recurrent is None:
        return 0
    ssm, conv = (allocator.held_in_withheld(kind) for kind in (PageKind.SSM, PageKind.CONV))
    parts.recurrent.states.vacate({allocator.huge_page_of(page) for page in (*ssm, *conv)})
    return len(ssm) * (geometry.ssm_page_bytes or 0) + len(conv) * (geometry.conv_row_bytes or 0)


def _make_room(parts: Parts) -> tuple[int, int]:
    """Retire experts, and evict and gather blocks where that is not enough, until what lies in withheld pages fits elsewhere.

    Returns:
        experts retired, tokens evicted.
    """
    pool, blocks, residency = parts.pool, parts.blocks, parts.residency
    if parts.recurrent is not None:
        return _make_room_beside_states(parts, parts.recurrent)
    allocator, per_expert = pool.allocator, residency.pages_per_expert
    per_parent = pool.geometry.layout(PageKind.KV).per_parent

    def lacking() -> int:
        """Experts that have to go."""
        parents = -(-max(0, allocator.count_in_withheld(PageKind.KV) - allocator.gaps(PageKind.KV)) // per_parent)
        beyond = allocator.count_in_withheld(PageKind.EXPERT)
        return -(-max(0, beyond + parents - allocator.available(PageKind.EXPERT)) // per_expert)

    retired = evicted = 0
    while experts := lacking():
        if experts <= residency.shrinkable:
            retired += residency.shrink(experts)
            continue
        freed = blocks.evict(blocks.num_layers)
        evicted += freed // blocks.num_layers * blocks.block_tokens
        if not freed and not blocks.gather():
            raise _scattered()
    return retired, evicted


def _make_room_beside_states(parts: Parts, recurrent: Recurrent) -> tuple[int, int]:
    """As `_make_room`, where pages of all kinds are in the way."""
    allocator, blocks, residency, layout = parts.pool.allocator, parts.blocks, parts.residency, recurrent.states.layout
    experts, kv = residency.num_resident, allocator.owned(PageKind.KV)

    def wanted() -> Wanted:
        counts = (allocator.count_in_withheld(kind) for kind in (PageKind.KV, PageKind.SSM, PageKind.CONV, PageKind.EXPERT))
        kv_pages, ssm, conv, expert_pages = counts
        return Wanted(kv_pages, ssm // layout.per_huge, conv // layout.run_length, expert_pages)

    if not recurrent.room.free_up(wanted):
        raise _scattered()
    recurrent.room.trim()
    evicted = (kv - allocator.owned(PageKind.KV)) // blocks.num_layers * blocks.block_tokens
    return experts - residency.num_resident, evicted


def _scattered() -> DoesNotFitError:
    return DoesNotFitError(
        "The pages of what is running lie too scattered for so small a pool; nothing of it was moved.",
        hint="Stop what is running first, or give a little more.",
    )


def described(info: EngineInfo, parts: Parts, config: EngineConfig, plan: MemoryPlan | DevicePlan) -> EngineInfo:
    """`info` under a new plan: sizes, context, and the notices that follow from them."""
    model_context = info.model_context
    stale = set(context_notices(info.context_limit, config, model_context))
    notices = [notice for notice in info.notices if notice not in stale and not notice.startswith(_KEPT)]
    notices += context_notices(plan.context, config, model_context)
    if parts.pool.why_kept and plan.pool < parts.pool.committed_bytes:
        notices.append(f"{_KEPT} ({_mib(parts.pool.committed_bytes - plan.pool)}): {parts.pool.why_kept}.")
    return replace(
        info,
        memory_bytes=plan.ceiling,
        pool_bytes=plan.pool,
        workspace_bytes=plan.workspace,
        context_limit=plan.context,
        context_reason=context_reason(plan.context, config, model_context),
        notices=tuple(notices),
    )


def _free_bytes(parts: Parts) -> int:
    if parts.device.type == "cuda":
        return int(torch.cuda.mem_get_info(parts.device)[0])
    return int(psutil.virtual_memory().available)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"
