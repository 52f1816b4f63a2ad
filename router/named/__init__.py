"""What operators have named, as the store has it: low-rank adapters, and beginnings of prompts."""
