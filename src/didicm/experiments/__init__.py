"""Grids of trainings and what they show: results on disk, tables, verdict, figures, report."""

from didicm.experiments.cells import METHODS, Cell, Reading, Setting, make_cells
from didicm.experiments.grid import run_grid
from didicm.experiments.results import Results
from didicm.report.html import write_report
from didicm.report.records import Row, rows_of
from didicm.report.tables import cost_table, difference_table, main_table
from didicm.report.verdict import verdict

__all__ = [
    "METHODS",
    "Cell",
    "Reading",
    "Results",
    "Row",
    "Setting",
    "cost_table",
    "difference_table",
    "main_table",
    "make_cells",
    "rows_of",
    "run_grid",
    "verdict",
    "write_report",
]
