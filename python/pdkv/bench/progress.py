"""A progress bar on a terminal, nothing elsewhere. rich is optional."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Shows `total` steps on stderr; gives a function that names the work and one that advances by a step."""
    if not sys.stderr.isatty():
        yield (lambda _: None), (lambda: None)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield (lambda text: print(text, file=sys.stderr)), (lambda: None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield (lambda text: bar.update(task, description=text)), (lambda: bar.advance(task))
