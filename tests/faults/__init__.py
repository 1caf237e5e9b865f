"""What happens to a run when things go wrong: RELIABILITY A14, docs/reference/reliability.md."""
