"""Runs target/draft pairs for real: AR, SD and SSD on transformers models, every pass recorded.

    load_pair(name_or_path, allow_other_tokenizer=False) -> Pair       no torch needed; also "synthetic:layers=32,..."
        Pair.prompts(split, num, num_tokens) -> tuple of token-id tuples; .stop_ids; .tokenizer; .vocab_size; .hashes
    SyntheticPair(layers, hidden_size, ..., divergence) -> Pair        random weights of any shape
    with open_runner(pair, concurrency="auto"|"processes"|"streams"|"serial",
                     dtype="float32"|"float64"|"bfloat16"|"float16",
                     device="cpu"|"cuda"|"cuda:i", draft_device=None, graphs=False) as runner:
        execute(policy, workload, runner, seed=0, progress=None, on_draft_failure="raise"|"continue", on_tokens=None,
                log_probs=False, forced_acceptance=None, audit=False) -> sim.trace.Trace
                              on_tokens gets a NewTokens(sequence, tokens, text, stop_reason) for every row of a round
        measure_agreement(runner, workload, seed=0, num_candidates=32, progress=None) -> sim.agreement.AgreementRecord
        measure_latency(runner, LatencyGrid(...), budget_s, seed=0, min_blocks=5, progress=None) -> LatencyProfile
                                                                       (.samples, .num_cells, .num_blocks)
        top2_gap(runner, tokens) -> float
        runner.identity() -> dict

Import from the modules: `executor.pairs`, `executor.synthetic_pair`, `executor.concurrency`, `executor.execute`,
`executor.profiling`. Only those of the pairs can be imported without torch.
"""
