"""Samples to rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[tuple[int, ...]]:
    """Best-fit decreasing: from the longest sample to the shortest, each into the fullest row with room.

    How many rows come out depends on the lengths alone, so each epoch has as many steps as the next;
    `order` decides which of the samples of one length goes where.

    Args:
        lengths: tokens of each sample, at most `capacity` each.
        capacity: tokens of a row.
        order: the samples' indices, in the order in which equally long ones are placed.

    Returns:
        The samples' indices, row by row: each index once.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> rows with just so many, the newest last
    rooms: list[int] = []  # the keys of with_room, ascending
    for sample in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[sample]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(sample)
        left = room - length
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return [tuple(row) for row in rows]
