"""Evaluation: lm-evaluation-harness tasks through our decoder, the paper's tables and curves."""
