"""The bar that long commands draw."""

from __future__ import annotations

import io
import os

import pytest

from fastdp.utils import progress_bar
from fastdp.utils.progress_bar import Bar


class Screen(io.StringIO):
    """A terminal, as far as a bar can tell."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What a line held each time that it was drawn."""
        return [part.rstrip() for part in self.getvalue().split("\r") if part.strip()]


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as the bar counts them."""
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress_bar.shutil, "get_terminal_size", lambda: os.terminal_size((100, 20)))
    return now


def test_time_left_is_that_of_the_mean_speed(clock):
    screen = Screen()
    bar = Bar(100, screen)
    for done in range(5, 45):  # it goes on from a checkpoint: what was done before took no time
        clock[0] = (done - 5) * 3.0
        bar.at(done, f"epsilon {done / 10}")
    first, second, *_, last = screen.lines()
    assert first == "  [#.......................] 5/100  epsilon 0.5"  # no speed is known yet
    assert second == "  [#.......................] 6/100  epsilon 0.6  5 min left"  # 94 times 3 s, 282 s
    assert last == "  [##########..............] 44/100  epsilon 4.4  3 min left"  # 56 times 3 s
    bar.at(100)
    assert screen.getvalue().endswith("\n") and "left" not in screen.lines()[-1]


def test_what_comes_quickly_is_drawn_now_and_then(clock):
    screen = Screen()
    bar = Bar(1000, screen)
    for done in range(1000):
        clock[0] = done / 1000
        bar.at(done)
    assert 9 <= len(screen.lines()) <= 11


def test_where_no_one_watches_the_end_alone_is_said(clock):
    file = io.StringIO()
    bar = Bar(3, file)
    for done in range(4):
        clock[0] += 60
        bar.at(done, "private")
    assert file.getvalue() == "  [########################] 3/3  private\n"


def test_parts_count_from_nothing_and_lines_are_cleared(clock):
    screen = Screen()
    bar = Bar(2.0, screen)
    second = bar.part(1, "second")
    second(0.5)
    assert screen.lines()[-1] == "  [##################......] 75 %  second"
    bar.clear()
    assert screen.getvalue().endswith(" \r")  # nothing stands there
    bar.clear()
    drawn = len(screen.getvalue())
    bar.clear()
    assert len(screen.getvalue()) == drawn


def test_a_line_is_no_longer_than_the_terminal(clock, monkeypatch):
    monkeypatch.setattr(progress_bar.shutil, "get_terminal_size", lambda: os.terminal_size((40, 20)))
    screen = Screen()
    Bar(10, screen).at(1, "a text that does not fit beside the bar")
    assert len(screen.lines()[0]) <= 39
