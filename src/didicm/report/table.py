"""A table as text, for the screen and for the report."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A table as text, for the screen and for the report."""

    title: str
    header: list[str]
    rows: list[list[str]]
    groups: list[int]  # rows before which a new group begins
    note: str = ""
    spare: tuple[str, ...] = ()  # columns to leave out where there is no room, the most dispensable first

    def to_rich(self, width: int = 1000) -> RichTable:
        """For a screen of so many characters."""
        dropped: list[str] = []
        for name in self.spare:
            if self._width(dropped) <= width:
                break
            dropped.append(name)
        narrow = self._width(dropped) > width
        left_out = [*dropped, *(["intervals"] if narrow else [])]
        note = self.note + (f"; report.html also has {', '.join(left_out)}" if left_out else "")
        table = RichTable(
            title=escape(self.title), caption=escape(note), title_justify="left", caption_justify="left"
        )
        kept = [i for i, name in enumerate(self.header) if name not in dropped]
        for i in kept:
            heading = self.header[i].replace(", ", "\n") if narrow else self.header[i]
            table.add_column(escape(heading), justify="right" if i else "left")
        for number, row in enumerate(self.rows):
            if number in self.groups and number:
                table.add_section()
            cells = [row[i].partition(" ± ")[0] if narrow and i else row[i] for i in kept]
            table.add_row(*map(escape, cells))
        return table

    def to_markdown(self) -> str:
        """For a document."""
        lines = [
            f"## {self.title}",
            "",
            f"| {' | '.join(self.header)} |",
            "|---|" + "---:|" * (len(self.header) - 1),
        ]
        lines += [f"| {' | '.join(cell.strip() for cell in row)} |" for row in self.rows]
        return "\n".join([*lines, *(["", f"{self.note}."] if self.note else []), ""])

    def _width(self, dropped: Sequence[str]) -> int:
        columns = [column for column in zip(self.header, *self.rows, strict=True) if column[0] not in dropped]
        return sum(max(map(len, column)) for column in columns) + 3 * len(columns) + 1
