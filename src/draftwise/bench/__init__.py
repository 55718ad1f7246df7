"""Benchmarks through the public names: prompts, drafters side by side, the cost of a pass, forecasts."""
