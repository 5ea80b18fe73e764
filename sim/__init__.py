"""Simulator of speculative decoding: policies over an agreement record and measured latencies. Needs no torch.

simulate(policy, workload, system, seed) -> Trace          one run on simulated clocks (SimPy)
predict(policy, workload, system, engine=...) -> Prediction
search(space, workload, system) -> SearchResult
"""

from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative, policy_from_dict
from sim.search import SearchResult, search
from sim.search_space import SearchSpace
from sim.simulate import Prediction, predict, simulate
from sim.system import System
from sim.trace import Trace
from sim.workload import Workload

__all__ = [
    "Autoregressive",
    "BadInput",
    "Fallback",
    "Policy",
    "Prediction",
    "SearchResult",
    "SearchSpace",
    "Speculative",
    "SpeculativeSpeculative",
    "System",
    "Trace",
    "Workload",
    "policy_from_dict",
    "predict",
    "search",
    "simulate",
]
