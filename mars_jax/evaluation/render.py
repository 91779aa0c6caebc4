"""Tables as Markdown and HTML. A missing number becomes a dash with a footnote that says why."""

import html
from collections.abc import Callable, Sequence

from mars_jax.evaluation.results import Cell, Missing
from mars_jax.evaluation.tables import Table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left }
tr.ours { background: #eef5ff } p.note, ol { color: #555; font-size: 13px }
""".strip()


def _texts(tables: Sequence[Table], mark: Callable[[int], str]) -> tuple[list[list[list[str]]], list[str]]:
    """All cells as text, and the footnotes they refer to, equal reasons sharing one."""
    reasons: list[str] = []

    def text(cell: str | Cell, digits: int) -> str:
        if isinstance(cell, str):
            return cell
        if not isinstance(cell, Missing):
            return f"{cell:.{digits}f}"
        if cell.reason not in reasons:
            reasons.append(cell.reason)
        return "–" + mark(reasons.index(cell.reason) + 1)

    cells = [[[text(c, d) for c, d in zip(row, table.digits, strict=True)] for row in table.rows] for table in tables]
    return cells, reasons


def markdown(tables: Sequence[Table]) -> str:
    cells, reasons = _texts(tables, lambda n: f"[^{n}]")
    parts = []
    for table, rows in zip(tables, cells, strict=True):
        alignment = [":--" if i < 3 else "--:" for i in range(len(table.header))]
        lines = [f"| {' | '.join(row)} |" for row in [table.header, alignment, *rows]]
        parts += [f"## {table.title}", "\n".join(lines), table.note]
    parts += [f"[^{n}]: {reason}." for n, reason in enumerate(reasons, 1)]
    return "\n\n".join(part for part in parts if part) + "\n"


def page(tables: Sequence[Table]) -> str:
    """One HTML page without scripts or anything to fetch."""
    cells, reasons = _texts(tables, lambda n: f'<sup><a href="#why{n}">{n}</a></sup>')
    parts = []
    for table, rows in zip(tables, cells, strict=True):
        parts.append(f"<h2>{html.escape(table.title)}</h2>\n<table>")
        parts.append(_row("th", [html.escape(name) for name in table.header]))
        for row, source in zip(rows, table.rows, strict=True):
            texts = [html.escape(t) if isinstance(c, str) else t for t, c in zip(row, source, strict=True)]
            parts.append(_row("td", texts, ours=row[1].startswith("ours")))
        parts.append(f'</table>\n<p class="note">{html.escape(table.note)}</p>')
    if reasons:
        notes = "\n".join(f'<li id="why{n}">{html.escape(reason)}</li>' for n, reason in enumerate(reasons, 1))
        parts.append(f"<h2>What is missing, and why</h2>\n<ol>\n{notes}\n</ol>")
    head = f'<meta charset="utf-8"><title>Evaluation</title><style>\n{STYLE}\n</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _row(tag: str, texts: Sequence[str], ours: bool = False) -> str:
    start = '<tr class="ours">' if ours else "<tr>"
    return start + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"
