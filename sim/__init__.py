"""Simulator of speculative decoding: policies over an agreement record and measured latencies. Needs no torch.

simulate(policy, workload, system, seed) -> Trace          one run on simulated clocks (SimPy)
predict(policy, workload, system, engine=...) -> Prediction
serve(policy, load, workload, system) -> ServingReport     requests as they arrive
search(space, workload, system) -> SearchResult            also search_batch_sizes, goodput_of_finalists
sensitivity(found, workload, system), win_map(space, workload, system)      what if; where SSD wins
"""

from sim.errors import BadInput
from sim.front import search_batch_sizes
from sim.goodput import goodput_of_finalists
from sim.hill_climbing import HillClimbing
from sim.load import ClosedLoop, OpenLoop, Poisson
from sim.objective import Objective
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    Policy,
    PolicyTable,
    Speculative,
    SpeculativeSpeculative,
    policy_from_dict,
)
from sim.running_statistics import RunningStatistics
from sim.search import SearchResult, search
from sim.search_space import SearchSpace
from sim.sensitivity import sensitivity
from sim.serving import Slo, serve
from sim.simulate import Prediction, predict, simulate
from sim.system import System
from sim.trace import Trace
from sim.win_map import win_map
from sim.workers import Workers
from sim.workload import Workload

__all__ = [
    "Autoregressive",
    "BadInput",
    "ClosedLoop",
    "Fallback",
    "HillClimbing",
    "LateBuild",
    "Objective",
    "OpenLoop",
    "Poisson",
    "Policy",
    "PolicyTable",
    "Prediction",
    "RunningStatistics",
    "SearchResult",
    "SearchSpace",
    "Slo",
    "Speculative",
    "SpeculativeSpeculative",
    "System",
    "Trace",
    "Workers",
    "Workload",
    "goodput_of_finalists",
    "policy_from_dict",
    "predict",
    "search",
    "search_batch_sizes",
    "sensitivity",
    "serve",
    "simulate",
    "win_map",
]
