"""Expert residency decided on the device: which experts a step lacks, where they go, and copying them there.

A decode step of one layer is `resolve` (or `route`, which chooses the experts too), then `fetch`, then the experts' feed-forward over
`plan.entries`; all can be captured in one graph. `state.py` has the tensors, `reference.py` the rules in plain Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.expert_fetch import reference
from rimuru_kernels.expert_fetch.state import COUNTER_NAMES, FetchPlan, LayerResidency, ResolvePolicy
from rimuru_kernels.rms_norm import add_rms_norm
from rimuru_kernels.topk_gating import topk_gating

__all__ = ["COUNTER_NAMES", "FetchPlan", "LayerResidency", "ResolvePolicy", "count", "fetch", "predict", "resolve", "route"]

MAX_TOKENS = 64
"""Most tokens of a step whose residency is decided on the device; longer steps touch nearly all experts and are streamed."""

MAX_EXPERTS = 1024


def _check(name: str, tokens: int, top_k: int, state: LayerResidency, plan: FetchPlan, device: torch.device) -> None:
    experts, pages = state.entries.shape
    expected = [
        ("state.entries", state.entries, torch.int32, (experts, pages)),
        ("state.scores", state.scores, torch.float32, (experts,)),
        ("state.host", state.host, torch.int64, (experts,)),
        ("state.counters", state.counters, torch.int64, (len(COUNTER_NAMES),)),
        ("plan.entries", plan.entries, torch.int32, (experts, pages)),
        ("plan.sources", plan.sources, torch.int64, (plan.sources.numel(),)),
        ("plan.pages", plan.pages, torch.int32, (plan.sources.numel(), pages)),
        ("plan.count", plan.count, torch.int32, (1,)),
        ("plan.scratch", plan.scratch, torch.int32, (plan.scratch.shape[0], pages)),
        ("plan.arrived", plan.arrived, torch.int32, (1,)),
        ("plan.tally", plan.tally, torch.int64, (experts,)),
    ]
    for label, tensor, dtype, shape in expected:
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name}: {label} must be contiguous {dtype} {list(shape)} on {device}, "
                f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if not 1 <= tokens <= MAX_TOKENS or not 1 <= top_k <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"{name}: {tokens} tokens with {top_k} of {experts} experts; at most {MAX_TOKENS} tokens and {MAX_EXPERTS} experts"
        )
    if plan.sources.numel() < min(experts, tokens * top_k):
        raise ValueError(f"{name}: a plan for {plan.sources.numel()} misses is too small for {tokens} tokens with {top_k} experts each")


def _check_routing(name: str, ids: Tensor, weights: Tensor) -> None:
    if ids.ndim != 2 or ids.is_floating_point() or weights.dtype is not torch.float32 or weights.shape != ids.shape:
        raise ValueError(f"{name}: ids {ids.dtype} {list(ids.shape)}, weights {weights.dtype} {list(weights.shape)}")
    if not ids.is_contiguous() or not weights.is_contiguous():
        raise ValueError(f"{name}: ids and weights must be contiguous")


def count(
    topk_ids: Tensor,
    topk_weights: Tensor,
    state: LayerResidency,
    policy: ResolvePolicy = ResolvePolicy(),  # noqa: B008 (frozen)
) -> None:
    """Keep a layer's scores and counters as `resolve` does, in a step of any size whose experts are all there by other means.

    Args:
        topk_ids: int32 or int64 [T, k] contiguous; negative ids select nothing.
        topk_weights: float32 [T, k] contiguous.
        state: the layer's tensors; scores and the counters of uses and hits are updated.
        policy: its decay counts.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    _check_routing("count", topk_ids, topk_weights)
    experts = state.entries.shape[0]
    tensors = (topk_ids, topk_weights, state.entries, state.scores, state.counters)
    if len({t.device for t in tensors}) > 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("count: all tensors must be contiguous and on one device")
    kinds = [state.entries.dtype, state.scores.dtype, state.counters.dtype]
    if (
        kinds != [torch.int32, torch.float32, torch.int64]
        or state.scores.shape != (experts,)
        or state.counters.numel() != len(COUNTER_NAMES)
    ):
        raise ValueError(f"count: entries {list(state.entries.shape)}, scores {list(state.scores.shape)}, counters of {kinds} do not fit")
    if not 1 <= topk_ids.shape[1] <= experts <= MAX_EXPERTS:
        raise ValueError(f"count: {topk_ids.shape[1]} of {experts} experts a token; at most {MAX_EXPERTS} experts")
    if not len(topk_ids):
        return
    if topk_ids.is_cuda:
        from rimuru_kernels.expert_fetch import count_kernel

        count_kernel.count(topk_ids, topk_weights, state, policy.decay)
    else:
        reference.count(topk_ids, topk_weights, state, policy.decay)


def resolve(
    topk_ids: Tensor,
    topk_weights: Tensor,
    state: LayerResidency,
    plan: FetchPlan,
    policy: ResolvePolicy = ResolvePolicy(),  # noqa: B008 (frozen)
    *,
    num_tokens: Tensor | None = None,
) -> None:
    """Make room for the experts that a step lacks, and list what to copy.

    Scores: s <- decay * s + w / (sum of the token's w) for each token in turn; a share that is NaN or outside 0 .. 1 adds nothing. Among
    the selected experts the absent ones are misses, best score first. Each takes the pages of the resident, unselected expert with the
    lowest score (equals: the lowest index), which becomes absent at once; an expert that the device cannot read again keeps its pages.
    With at least 2 * top_k residents in the layer one token always finds room; where there is none, the next scratch row of the plan serves
    for this step; without one, the expert's row of plan.entries is -1 and the counter "unplaced" grows.

    Args:
        topk_ids: int32 or int64 [T, k], T <= 64; negative ids select nothing.
        topk_weights: float32 [T, k].
        state: the layer's tensors; entries, scores and counters are updated.
        plan: receives entries, sources, pages and count.
        policy: see there.
        num_tokens: int32 [1] or None; only the first num_tokens rows count (the rest pads a captured graph).

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    _check_routing("resolve", topk_ids, topk_weights)
    _check("resolve", topk_ids.shape[0], topk_ids.shape[1], state, plan, topk_ids.device)
    if topk_ids.is_cuda:
        from rimuru_kernels.expert_fetch import kernel

        kernel.resolve(topk_ids, topk_weights, state, plan, policy, num_tokens)
    else:
        reference.resolve(topk_ids, topk_weights, state, plan, policy, num_tokens)


def route(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    top_k: int,
    renormalize: bool,
    state: LayerResidency,
    plan: FetchPlan,
    policy: ResolvePolicy = ResolvePolicy(),  # noqa: B008 (frozen)
    *,
    num_tokens: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From attention's output to the list of copies in one launch: residual add, norm, router, top-k gating, `resolve`.

    Every program computes the norm of every token, so this pays for few tokens (up to 8 or so).

    Args:
        x, residual: [T, d] contiguous, one dtype; their sum is the new residual.
        norm_weight: [d], of x's dtype or float32 (see `rms_norm`); eps: of the norm.
        router: [E, d] in the same dtype. Logits are accumulated and kept in float32.
        top_k, renormalize: as for `topk_gating`.
        state, plan, policy, num_tokens: as for `resolve`; rows from num_tokens on get ids of -1 and weights of 0.
        given: (ids int64 [T, k], weights float32 [T, k]), a recorded choice that is resolved and returned instead of the router's, whose
            work is done all the same.

    Returns:
        new residual [T, d], its norm [T, d] (the experts' input), weights float32 [T, k], ids int64 [T, k] ascending.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    experts = router.shape[0]
    if x.ndim != 2 or residual.shape != x.shape or norm_weight.shape != x.shape[1:] or router.shape[1:] != x.shape[1:]:
        raise ValueError(f"route: x {list(x.shape)}, residual {list(residual.shape)}, router {list(router.shape)} do not go together")
    if len({t.dtype for t in (x, residual, router)}) > 1 or not all(t.is_contiguous() for t in (x, residual, router)):
        raise ValueError("route: x, residual and router must be contiguous and of one dtype")
    if norm_weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"route: the norm's weight is {norm_weight.dtype}, x is {x.dtype}; it must be like x, or float32")
    if experts != state.entries.shape[0]:
        raise ValueError(f"route: a router of {experts} experts, residency of {state.entries.shape[0]}")
    _check("route", x.shape[0], top_k, state, plan, x.device)
    if given is not None and any(
        t.shape != (x.shape[0], top_k) or t.dtype is not dtype or not t.is_contiguous() or t.device != x.device
        for t, dtype in zip(given, (torch.int64, torch.float32), strict=True)
    ):
        raise ValueError(f"route: a given routing must be int64 and float32 [{x.shape[0]}, {top_k}], contiguous and on {x.device}")
    if x.is_cuda:
        from rimuru_kernels.expert_fetch import kernel

        residual_out, hidden = torch.empty_like(x), torch.empty_like(x)
        weights = torch.empty((x.shape[0], top_k), dtype=torch.float32, device=x.device)
        ids = torch.empty((x.shape[0], top_k), dtype=torch.int64, device=x.device)
        kernel.route(
            x, residual, norm_weight, eps, router, renormalize, hidden, residual_out, ids, weights, state, plan, policy, num_tokens, given
        )
        return residual_out, hidden, *((weights, ids) if given is None else (given[1], given[0]))
    residual_out, hidden = add_rms_norm(x, residual, norm_weight, eps)
    weights, ids = topk_gating(torch.nn.functional.linear(hidden.float(), router.float()), top_k, renormalize)
    if num_tokens is not None:
        weights[int(num_tokens) :] = 0.0
        ids[int(num_tokens) :] = -1
    if given is not None:
        ids, weights = given
    resolve(ids, weights, state, plan, policy, num_tokens=num_tokens)
    return residual_out, hidden, weights, ids


def predict(
    x: Tensor,
    router: Tensor,
    top_k: int,
    state: LayerResidency,
    plan: FetchPlan,
    policy: ResolvePolicy = ResolvePolicy(),  # noqa: B008 (frozen)
    *,
    limit: int = 1,
) -> None:
    """Guess which experts a layer will select for a token, and make room for the likeliest of those that it lacks.

    The top_k experts of softmax(router x) are the guess. Up to `limit` of its absent experts, largest weight first, each take the pages of
    the resident with the lowest score that is not guessed, as in `resolve`, but only as long as the guess, were it true, would outrank it:
    decay * s + w / (sum of the guess's w) > decay * s of the victim. Scores and the counters of uses and hits are not touched.

    Args:
        x: [1, d] contiguous, what an earlier layer's router saw.
        router: [E, d] of the layer, in x's dtype.
        state: the layer's tensors; entries and the counter "fetched" are updated.
        plan: one of its own; receives sources, pages and count. Its copies must be complete before the layer's next `fetch` begins.
        policy: only its decay counts.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if x.ndim != 2 or x.shape[0] != 1 or router.shape[1:] != x.shape[1:] or router.shape[0] != state.entries.shape[0]:
        raise ValueError(f"predict: x {list(x.shape)}, router {list(router.shape)} and residency of {state.entries.shape[0]} experts")
    if router.dtype is not x.dtype or not x.is_contiguous() or not router.is_contiguous() or limit < 1:
        raise ValueError(f"predict: x {x.dtype} and router {router.dtype} must be contiguous and of one dtype, limit {limit} positive")
    _check("predict", 1, top_k, state, plan, x.device)
    if x.is_cuda:
        from rimuru_kernels.expert_fetch import kernel

        kernel.predict(x, router, top_k, state, plan, policy, limit)
    else:
        weights, ids = topk_gating(torch.nn.functional.linear(x.float(), router.float()), top_k, renormalize=True)
        reference.predict(ids, weights, state, plan, policy, limit)


def fetch(plan: FetchPlan, pool: Tensor, page_bytes: int, columns: tuple[int, int] | None = None, *, copied: int | None = None) -> None:
    """Copy the experts that `plan` lists from host memory into the pool.

    Args:
        plan: of the preceding `resolve` or `route` on the same stream.
        pool: uint8 [bytes], 16-byte aligned.
        page_bytes: bytes of one of an expert's pages, a multiple of 16; an expert's pages follow one another in host memory.
        columns: (first, end) of each expert's pages, to copy these alone; None: all.
        copied: bytes at the beginning of each page that mean something and are copied, a multiple of 16; None: all.

    Raises:
        ValueError: sizes or dtypes out of range.
    """
    if page_bytes < 16 or page_bytes % 16 or pool.dtype is not torch.uint8 or pool.ndim != 1 or pool.device != plan.count.device:
        raise ValueError(f"fetch: pages of {page_bytes} bytes (a multiple of 16 is needed), pool {pool.dtype} {list(pool.shape)}")
    columns = (0, plan.pages.shape[1]) if columns is None else columns
    if not 0 <= columns[0] < columns[1] <= plan.pages.shape[1]:
        raise ValueError(f"fetch: columns {columns} of {plan.pages.shape[1]} pages")
    copied = page_bytes if copied is None else copied
    if not 16 <= copied <= page_bytes or copied % 16:
        raise ValueError(f"fetch: {copied} bytes of pages of {page_bytes} (a multiple of 16 is needed)")
    if pool.is_cuda:
        from rimuru_kernels.expert_fetch import kernel

        kernel.fetch(plan, pool, page_bytes, columns, copied=copied)
    else:
        reference.fetch(plan, pool, page_bytes, columns, copied)
