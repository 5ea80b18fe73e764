"""Calibration: from the records of real runs to the simulator's system, and from predictions to their errors.

Reads record files and traces; never loads a model.
"""
