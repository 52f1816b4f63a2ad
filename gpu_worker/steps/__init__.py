"""What a runner is given for a step, and what it brings: plain values, without torch and numpy."""
