"""Slow, plain answers in float64, one module an operator: loops that a reader can check by eye."""
