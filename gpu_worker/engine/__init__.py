"""The step loop: plan, run, commit; how long steps take; and what a worker's settings come to."""
