saguaro sweep experiments/configs/fallback_by_batch_size.yaml --set search.budgets=[8] --quiet --num-workers 1
