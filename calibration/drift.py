"""Whether the machine became slower or faster while it was profiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.stats import theilslopes

from calibration.latency_fit import idle_cells
from sim.latency import LatencySample
from sim.metrics import Estimate
from sim.trace import Lane

FEWEST_BLOCKS = 5  # for a trend over them


def drift(samples: Sequence[LatencySample]) -> dict[Lane, Estimate]:
    """Relative change of the durations from the first interleaved block to the last, of the lanes whose samples are of
    `FEWEST_BLOCKS` blocks at least: Theil and Sen's slope through the blocks' median ratios to the cells' medians, over
    all blocks. n is the number of blocks."""
    ratios: dict[Lane, dict[int, list[float]]] = {lane: defaultdict(list) for lane in Lane}
    for (lane, *_), own in idle_cells(samples).items():
        location_s = np.median([s.duration_s for s in own])
        for s in own:
            ratios[lane][s.block].append(s.duration_s / location_s)
    found = {}
    for lane, by_block in ratios.items():
        if len(by_block) >= FEWEST_BLOCKS:
            blocks = sorted(by_block)
            fitted = theilslopes([np.median(by_block[block]) for block in blocks], blocks)
            span = blocks[-1] - blocks[0]
            value, low, high = (float(slope) * span for slope in (fitted[0], fitted[2], fitted[3]))
            found[lane] = Estimate(value, low, high, len(blocks))
    return found
