"""Runs the plan of a step on a model and a device."""
