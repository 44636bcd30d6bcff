"""The page of all messages has each of them once, under what went wrong."""

import fnmatch
import re

import pytest
from test_pages import load

messages = load("messages")


def test_the_page_is_what_the_script_writes() -> None:
    page = messages.PAGE.read_text()
    assert messages.page_of(page) == page, "run `python scripts/messages.py`"


def test_every_message_is_on_the_page_once() -> None:
    listed = re.findall(r'^--8<-- "tests/golden/(.+)\.txt"$', messages.PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(file.stem for file in messages.GOLDEN.glob("*.txt"))


@pytest.mark.parametrize("kind", messages.TOPICS)
def test_topics_name_messages_that_there_are(kind: str) -> None:
    names = messages.kinds()[kind]
    for topic in messages.TOPICS[kind]:
        assert topic.shown
        assert set(topic.shown) <= set(names), topic.title
        for pattern in topic.folded:
            assert fnmatch.filter(names, pattern), f"{topic.title}: {pattern}"


def test_a_new_message_needs_no_topic(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brand_new.txt").write_text("treescan.OddError: `step` is odd.")
    monkeypatch.setattr(messages, "GOLDEN", tmp_path)
    page = messages.page_of("# All messages\n" + messages.START)
    assert "## OddError\n\n### Others" in page
    assert '--8<-- "tests/golden/brand_new.txt"' in page
