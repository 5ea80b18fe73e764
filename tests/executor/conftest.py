import pytest
import torch

from executor.concurrency import open_runner
from executor.pairs import load_pair
from tests.executor.tiny_models import llama, save_pair


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """A two-layer target and a draft that agrees with it about half the time: its first layer and a perturbed head."""
    target, draft = llama(2, seed=0), llama(1, seed=1)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    return load_pair(save_pair(tmp_path_factory.mktemp("pairs") / "tiny", target, draft))


@pytest.fixture(scope="session")
def self_draft_pair(tmp_path_factory):
    """The target as its own draft."""
    return load_pair(save_pair(tmp_path_factory.mktemp("pairs") / "self", llama(2, seed=0), llama(2, seed=0)))


@pytest.fixture(scope="session")
def tiny_serial(tiny_pair):
    with open_runner(tiny_pair, "serial", dtype="float64") as runner:
        yield runner


@pytest.fixture(scope="session")
def self_serial(self_draft_pair):
    with open_runner(self_draft_pair, "serial", dtype="float64") as runner:
        yield runner
