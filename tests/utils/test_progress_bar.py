"""The bar that long commands draw."""

from __future__ import annotations

import io

from fastdp.utils.progress_bar import Bar


class Screen(io.StringIO):
    """A terminal, as far as a bar can tell."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_what_is_done_and_the_end() -> None:
    screen = Screen()
    bar = Bar(2.0, screen)
    bar.at(0.5, "first")
    bar.part(1, "second")(0.5)
    bar.clear()
    assert " 25 % |" in screen.getvalue() and "first" in screen.getvalue()
    bar.at(2, "done")
    assert "100 % |" in screen.getvalue() and "done" in screen.getvalue() and screen.getvalue().endswith("\n")


def test_where_no_one_watches_the_end_alone_is_said() -> None:
    file = io.StringIO()
    bar = Bar(3, file)
    for done in range(4):
        bar.at(done, "private")
    assert file.getvalue() == "  3/3  private\n"
