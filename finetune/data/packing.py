"""Bin packing: which examples share a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def best_fit(sizes: Sequence[int], windows: Iterable[Sequence[int]], room: int) -> list[list[int]]:
    """Put things into as few rows of `room` as best-fit-decreasing finds, none of them split.

    Each window is taken in order of decreasing size, and each thing goes where it leaves the least room. Rows stay open
    from window to window: windows mix things at random without leaving half-filled rows at their ends. Of equal sizes
    the one that comes first in its window is first. Johnson (1973) shows that best-fit-decreasing needs at most 11/9 of
    the fewest rows, plus 4; the time here is that of sorting.

    Args:
        sizes: of each thing; at most `room`.
        windows: the numbers of the things, each once, in groups.
        room: of a row.

    Returns:
        The numbers of the things in each row, in the order in which they were put there.

    Raises:
        ValueError: a thing is larger than a row.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # room left -> the rows that have just that
    some = 0  # bit r: whether with_room[r] has any
    for window in windows:
        for thing in sorted(window, key=lambda n: -sizes[n]):
            size = sizes[thing]
            if size > room:
                raise ValueError(f"{size} does not fit a row of {room}")
            fitting = some >> size
            if fitting:
                left = size + (fitting & -fitting).bit_length() - 1
                row = with_room[left].pop()
                if not with_room[left]:
                    some ^= 1 << left
            else:
                left, row = room, len(rows)
                rows.append([])
            rows[row].append(thing)
            with_room[left - size].append(row)
            some |= 1 << (left - size)
    return rows
