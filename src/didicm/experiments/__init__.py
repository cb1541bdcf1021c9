"""Grids of trainings: what a study is, how its runs are carried out, and what they gave."""
