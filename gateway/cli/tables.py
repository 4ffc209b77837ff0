"""Tables on stdout: folded to a terminal's width, whole lines when another program reads."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 240


def plain_table(*headings: str, show_footer: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, show_footer=show_footer)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_table(table: Table, *, markup: bool = False) -> None:
    """markup: the cells are ours and may hold styles; names that others chose are never read so."""
    console = Console(markup=markup, emoji=False)
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, markup=markup, emoji=False)
    console.print(table)
