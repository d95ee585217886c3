"""What other libraries say, in one line."""

import pytest

from ddtree.errors import first_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \n"), "one"),
        (ValueError("these are missing:\n\n  a\n  b"), "these are missing: a"),
        (ValueError("cut short:"), "cut short:"),
        (KeyError("rope_theta"), "KeyError: 'rope_theta'"),
        (ValueError(), "ValueError"),
        (KeyError(), "KeyError"),
    ],
    ids=repr,
)
def test_first_line(error, text):
    assert first_line(error) == text
