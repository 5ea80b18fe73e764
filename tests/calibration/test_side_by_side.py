"""Whether working side by side is worth anything is read from the samples, not assumed."""

import pytest

from calibration.side_by_side import lack_of_overlap, side_by_side
from sim.latency import LatencySample
from sim.trace import Lane, Operation

SIZES = {Operation.VERIFY: (1, 4), Operation.GLUE: (1, 4), Operation.TREE_STEP: (2, 8)}
LANES = {Operation.VERIFY: Lane.TARGET, Operation.GLUE: Lane.DRAFT, Operation.TREE_STEP: Lane.DRAFT}


def samples(slowdown: dict[Lane, float], noise=(0.9, 1.0, 1.3)) -> list[LatencySample]:
    """A verification takes a second a token, a draft step a tenth; medians are exact whatever the noise."""
    seconds = {Lane.TARGET: 1.0, Lane.DRAFT: 0.1}
    return [
        LatencySample(lane, operation, width, context, busy, block, seconds[lane] * width * factor * slow)
        for operation, lane in LANES.items()
        for width in SIZES[operation]
        for context in (16, 64)
        for busy, slow in ((False, 1.0), (True, slowdown[lane]))
        for block, factor in enumerate(noise)
    ]


@pytest.mark.parametrize(
    ("target", "draft", "gain"), [(1.0, 1.0, 2.0), (2.0, 2.0, 1.0), (1.25, 5.0, 1.0), (1.1, 1.6, 1 / 1.1 + 1 / 1.6)]
)
def test_the_gain_is_the_sum_of_what_each_role_still_does(target: float, draft: float, gain: float) -> None:
    found = side_by_side(samples({Lane.TARGET: target, Lane.DRAFT: draft}))
    assert found is not None
    assert found.gain == pytest.approx(gain)
    steps = {step.operation: step for step in found.steps}
    assert steps.keys() == LANES.keys()
    assert (steps[Operation.VERIFY].num_tokens, steps[Operation.VERIFY].context) == (4, 64)
    assert steps[Operation.VERIFY].beside_s / steps[Operation.VERIFY].alone_s == pytest.approx(target)
    assert steps[Operation.TREE_STEP].alone_s == pytest.approx(0.8)


def test_a_profile_of_roles_that_take_turns_says_nothing() -> None:
    alone = [s for s in samples({Lane.TARGET: 1.0, Lane.DRAFT: 1.0}) if not s.busy]
    assert side_by_side(alone) is None
    assert side_by_side([]) is None


def test_no_overlap_is_said_with_its_fraction() -> None:
    perfect = side_by_side(samples({Lane.TARGET: 1.0, Lane.DRAFT: 1.0}))
    shared = side_by_side(samples({Lane.TARGET: 1.9, Lane.DRAFT: 1.9}))
    assert lack_of_overlap(None, perfect) is None
    assert lack_of_overlap(0.8, perfect) is None
    assert lack_of_overlap(0.8, None) is None
    assert "no overlap achieved: 4 % of the build's time" in str(lack_of_overlap(0.04, perfect))
    assert "80 % of the build's time lay beside a verification, but" in str(lack_of_overlap(0.8, shared))
    assert "only 1.05 times the work" in str(lack_of_overlap(0.8, shared))
