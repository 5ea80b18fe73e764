"""Recording of passes of fixed shapes as CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.static_pass import Capture, Replay

NUM_WARM_UP = 3  # runs before a recording: libraries choose kernels and take memory in the first ones


def graph_capture(device: torch.device) -> Capture:
    """Records passes of one role. The recordings share their working memory: they run one after another, and what a
    replay gives is used before the next one overwrites it."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Replay) -> Replay:
        with torch.cuda.device(device), torch.inference_mode():
            _warm_up(run, device)
            graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
            # The other role's thread may use the device meanwhile: only what this thread does must be recordable.
            with torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local"):
                logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return capture


def _warm_up(run: Replay, device: torch.device) -> None:
    """On a stream beside the present one, as recordings are made."""
    here, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        for _ in range(NUM_WARM_UP):
            run()
    here.wait_stream(beside)
