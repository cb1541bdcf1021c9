"""Grids of trainings and what they show: results on disk, tables, verdict, figures, report."""

from didicm.study.cells import METHODS, Cell, Reading, Setting, make_cells
from didicm.study.grid import run_grid
from didicm.study.report import write_report
from didicm.study.results import Results
from didicm.study.rows import Row, rows_of
from didicm.study.tables import cost_table, difference_table, main_table
from didicm.study.verdict import verdict

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
