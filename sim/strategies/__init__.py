"""Other ways to decode, on the inputs of `sim.predict`: trees, other drafters, PEARL, block verification, look-up.

A `Strategy` says what states a row has between rounds, what a round emits and where it leads, and what work it takes.
long_run(strategy, workload, system) -> LongRun            summary numbers, any batch
replayed(strategy, workload, system) -> Expectation        an agreement record, place by place, one row
played(strategy, workload, system, seed) -> Rate           the same chain on simulated clocks, as a check
"""
