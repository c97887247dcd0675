"""What a page holds."""

from __future__ import annotations

from html.parser import HTMLParser

_EMPTY = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Fails where a tag is not closed in its order, and where something of elsewhere would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.words: list[str] = []
        self.seen: set[str] = set()
        self.sources: set[str | None] = set()
        self.feed(text)
        self.close()
        assert self.stack == []

    @property
    def text(self) -> str:
        return "".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script" or attrs == []
        self.seen.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action"), (tag, name)
            if name == "href":
                assert (value or "").startswith("/"), (tag, value)
                self.sources.add(value)
        if tag not in _EMPTY:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
