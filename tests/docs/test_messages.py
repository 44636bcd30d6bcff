"""The list at the end of the page of errors has what goes wrong, by kind; and each message has a place in it."""

import fnmatch

import pytest

from scripts import script

messages = script("messages")


def test_the_list_is_what_the_script_writes() -> None:
    page = messages.PAGE.read_text()
    assert messages.page_of(page) == page, "run `python scripts/messages.py`"


@pytest.mark.parametrize("kind", messages.TOPICS)
def test_topics_name_messages_that_there_are(kind: str) -> None:
    names = messages.kinds()[kind]
    for topic in messages.TOPICS[kind]:
        assert topic.shown
        assert set(topic.shown) <= set(names), topic.title
        for pattern in topic.folded:
            assert fnmatch.filter(names, pattern), f"{topic.title}: {pattern}"


@pytest.mark.parametrize("kind", messages.kinds())
def test_a_message_is_in_one_topic(kind: str) -> None:
    names = messages.kinds()[kind]
    found = [name for topic, others in messages.sections(kind, names) for name in (*topic.shown, *others)]
    assert sorted(found) == names
