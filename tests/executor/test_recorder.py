"""A span lasts as long as its work on the device, however early the call returns."""

import itertools

from executor.execute import requests
from executor.loops import speculative
from executor.recorder import Recorder
from executor.sequence import OpenBatch
from executor.serial_draft import SerialDraft
from executor.target import Target
from executor.toy_model import HashModel
from sim.policy import SpeculativeSpeculative
from sim.trace import Lane, Operation
from sim.workload import Workload


class FakeDevice:
    """Takes work at once and does it later, one piece after another. Its clock counts how often the host waited."""

    def __init__(self) -> None:
        self.now_s = self.done_s = 0.0
        self.num_waits = 0

    def work(self, duration_s: float) -> None:
        self.done_s = max(self.done_s, self.now_s) + duration_s

    def start(self) -> None:
        self.time_s(self.mark())

    def mark(self) -> float:
        return max(self.done_s, self.now_s)

    def time_s(self, mark: float) -> float:
        self.num_waits += mark > self.now_s
        self.now_s = max(self.now_s, mark)
        return mark


def test_asynchronous_work_is_timed_at_its_real_duration() -> None:
    device = FakeDevice()
    recorder = Recorder(Lane.DRAFT, device)
    for duration_s in (0.5, 0.25, 2.0):
        with recorder.span(Operation.TREE_STEP, 4, [10]):
            device.work(duration_s)
        device.now_s += 0.001  # the host goes on
    assert device.num_waits == 0 and device.now_s < 0.01
    spans = recorder.spans
    assert [span.duration_s for span in spans] == [0.5, 0.25, 2.0]
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans))
    assert device.now_s == 2.75
    assert recorder.spans == spans and len(spans) == 3  # read again, nothing more


class DeviceModel(HashModel):
    """A model on a fake device, one second for each pass."""

    def __init__(self, clock: FakeDevice, *law) -> None:
        super().__init__(*law)
        self.clock = clock

    def feed(self, *args, **kwargs):
        self.clock.work(1.0)
        return super().feed(*args, **kwargs)

    def append_branches(self, *args):
        self.clock.work(1.0)
        return super().append_branches(*args)


def test_recording_waits_for_nothing_in_the_rounds_of_a_run() -> None:
    device = FakeDevice()
    draft = SerialDraft(DeviceModel(device, 16, 0, 1, 0.7))
    draft._service._recorder = Recorder(Lane.DRAFT, device)
    target = Target(DeviceModel(device, 16, 0), Recorder(Lane.TARGET, device))
    batch = OpenBatch(list(requests(Workload("test", ((1, 2, 3),), 12), seed=0)))
    policy = SpeculativeSpeculative(2, (1,) * 3, (1,) * 3)
    target.recorder.begin_batch([0])
    speculative(lambda num_rows: policy, batch, target, draft)
    assert len(target.recorder.rounds) > 3
    assert device.num_waits <= 1  # after the prefills
    spans = target.recorder.spans + draft.spans()
    assert {span.duration_s for span in spans if span.operation is not Operation.LOOKUP} == {1.0}
