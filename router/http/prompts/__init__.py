"""What bodies ask of prompts, and what answers show of them."""
