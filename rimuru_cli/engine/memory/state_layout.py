"""How the states of one sequence lie in the pool: recurrent states in whole huge pages, convolution rows in runs. Ints only.

    SSM    one page a recurrent layer; H = ceil(layers / n) huge pages of n states each, so that a sequence leaves whole huge pages behind
    conv   m rows a layer, one page a row, following each other; k runs of q layers each, q * m pages within one L2 page

Sequences share no page of these, and none of their parents but those of convolution runs, so nothing has to be moved when one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_models.errors import DoesNotFitError


@dataclass(frozen=True)
class StateLayout:
    """Pages of one sequence's states.

    Attributes:
        layers: recurrent layers.
        rows: m, rows of a convolution state.
        per_huge: n, recurrent states in a huge page.
        huge_pages: H, huge pages that the recurrent states take.
        run_layers: q, layers whose convolution rows lie in one run.
        runs: k, runs of convolution rows; each takes one L2 page at most.
        runs_per_parent: runs that one L2 page holds.
        conv_parent: the kind whose size that L2 page has.
    """

    layers: int
    rows: int
    per_huge: int
    huge_pages: int
    run_layers: int
    runs: int
    runs_per_parent: int
    conv_parent: PageKind

    @classmethod
    def build(cls, geometry: PoolGeometry, layers: int, rows: int) -> StateLayout:
        """The layout for so many recurrent layers with convolution states of `rows` rows.

        Raises:
            DoesNotFitError: the rows of one state do not fit a page together.
        """
        assert layers >= 1 and rows >= 1, "a model without recurrent layers has no states"
        conv = geometry.layout(PageKind.CONV)
        assert conv.parent is not None, "convolution rows lie in expert or SSM pages"
        most = conv.per_parent // rows
        if not most:
            raise DoesNotFitError(
                f"The {rows} rows of a convolution state ({conv.page_bytes} bytes each) do not fit a page of this pool together.",
                hint="This checkpoint's experts are too small next to its states; it cannot run from this pool.",
            )
        runs = -(-layers // most)
        run_layers = -(-layers // runs)
        per_huge = geometry.layout(PageKind.SSM).per_parent
        return cls(
            layers=layers,
            rows=rows,
            per_huge=per_huge,
            huge_pages=-(-layers // per_huge),
            run_layers=run_layers,
            runs=runs,
            runs_per_parent=conv.per_parent // (run_layers * rows),
            conv_parent=conv.parent,
        )

    @property
    def run_length(self) -> int:
        """Pages of one run of convolution rows."""
        return self.run_layers * self.rows

    def conv_pages(self, run: list[int], layer: int) -> list[int]:
        """The pages of one layer's rows in the run that holds them; `layer` counts within the run."""
        return run[layer * self.rows : (layer + 1) * self.rows]
