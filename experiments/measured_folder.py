"""A folder whose content is measured: now, or as far as an earlier session has not finished it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import experiments.bench
from experiments.bench import Bench
from experiments.config import ExperimentConfig
from experiments.ledger import Ledger
from experiments.output import LEDGER, is_finished, resumable_folder
from experiments.stages import Stages

Work = Callable[[Path, Bench, Stages, Ledger], object]  # folder to write into


def fill(
    out: Path,
    config: ExperimentConfig,
    console: Console,
    work: Work,
    *,
    overwrite: bool,
    resume: bool,
    quiet: bool = False,
) -> None:
    """Do `work` on the bench that `config` describes; nothing if with `resume` it is finished in `out`. Raises
    `BadInput` on a folder that may not be written into."""
    if resume and is_finished(out, config.to_dict()):
        return
    with resumable_folder(out, overwrite=overwrite, resume=resume) as folder:
        stages = Stages(console, quiet=quiet)
        with experiments.bench.open_bench(config, stages) as bench:
            work(folder, bench, stages, Ledger(folder / LEDGER, stages.spare))
