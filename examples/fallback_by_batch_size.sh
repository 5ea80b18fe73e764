saguaro sweep experiments/configs/fallback_by_batch_size.yaml --quiet --num-workers 1
