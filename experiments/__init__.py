"""Experiments: the command line, its YAML configurations, and the pipeline from a profile to a report."""
